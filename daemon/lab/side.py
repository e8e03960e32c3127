"""A daemon of the laboratory's own: one side of a comparison, started with exactly the settings it is given.

Owns its process and its directories. Nothing of the caller's configuration reaches it: no INFERD_* variable, no
configuration file. It ends when this process does, whatever ends that. Enter at `serving`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.errors import InferdError
from telemetry.client import SOCKET_NAME, Endpoint

READY_S: Final = 900.0  # a model may have to be fetched and prepared first
_STOP_S: Final = 60.0
# The kernel ends the child when the thread that started it is gone: so it is started by the main thread.
# It ends by itself if we died before it could say so.
_CODE: Final = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.getppid() == int(sys.argv.pop(1)) or os._exit(70); "
    "from daemon.cli import main; sys.argv[0] = 'inferd'; main()"
)


class SideFailed(InferdError):
    """This side cannot be measured: what its daemon said last."""

    code = "side_failed"
    exit_code = 1


@dataclass(frozen=True, slots=True)
class Side:
    """A daemon that is ready."""

    url: str
    endpoint: Endpoint
    ready_s: float


def toml(settings: Mapping[str, Any]) -> str:
    """Settings as a configuration file; None is left out."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in settings.items() if value is not None)


def _value(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)  # TOML writes these as JSON does


@contextmanager
def serving(model: str, settings: Mapping[str, Any]) -> Iterator[Side]:
    """Call from the main thread. Raises SideFailed if it ends before it is ready."""
    with tempfile.TemporaryDirectory(prefix="inferd-lab-") as made:
        home = Path(made)
        for name in ("run", "state"):
            (home / name).mkdir(mode=0o700)
        config, log = home / "settings.toml", home / "log"
        config.write_text(toml({**settings, "model": model, "port": 0}), encoding="utf-8")
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(os.getpid()), "serve", "--config", str(config)],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env=_environment(home),
                start_new_session=True,  # Ctrl-C is for us: we end it
            )
        try:
            began = time.monotonic()
            url = _ready(process, log, began)
            yield Side(url, Endpoint(socket=home / "run" / SOCKET_NAME), time.monotonic() - began)
        finally:
            _stop(process)


def _environment(home: Path) -> dict[str, str]:
    ours = str(Path(__file__).resolve().parent.parent.parent)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INFERD_")}
    path = os.pathsep.join(part for part in (ours, kept.get("PYTHONPATH", "")) if part)
    own = {"RUNTIME_DIRECTORY": str(home / "run"), "STATE_DIRECTORY": str(home / "state")}
    return {**kept, **own, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _ready(process: "subprocess.Popen[bytes]", log: Path, began: float) -> str:
    """Its address, once it is ready."""
    while time.monotonic() - began < READY_S:
        text = log.read_text(encoding="utf-8", errors="replace")
        if process.poll() is not None:
            raise SideFailed(_last_words(text) or f"inferd serve ended with {process.returncode}")
        found = re.search(r" at (http://\S+)", text)
        if found and _answers(f"{found[1]}/health/ready"):
            return found[1]
        time.sleep(0.1)
    raise SideFailed(f"inferd serve was not ready after {READY_S:.0f} s")


def _last_words(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("inferd: ")]
    return (said or lines or [""])[-1].removeprefix("inferd: ")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
