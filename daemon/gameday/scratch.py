"""The scratch daemon of a game day: `inferd serve` in a process, with directories, a port and settings of its own, and
a few clients that keep it busy.

Owns the process and that nothing of it is left. No setting of the machine's own daemon reaches it: not its variables,
not its file. It must not know any drill. Enter at `Scratch`.
"""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from engine.errors import InferdError
from telemetry.client import SOCKET_NAME, Client, ClientError, Endpoint

NAME: Final = "scratch"
_CLIENTS: Final = 3
_START_SECONDS: Final = 300.0
_STOP_SECONDS: Final = 20.0
_REQUEST_SECONDS: Final = 120.0
_LOG_LINES: Final = 5


class Scratch:
    """`inferd serve MODEL --drill …` under `directory`; it can be started again there. `more` are variables."""

    def __init__(self, directory: Path, model: str, drills: Sequence[str], **more: str) -> None:
        self._directory = directory
        self._model = model
        self._more = more
        self.drills = tuple(drills)
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self.answered = 0
        for name in ("run", "state"):
            (directory / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / "settings.toml").touch()

    @property
    def socket(self) -> Path:
        """Of control."""
        return self._directory / "run" / SOCKET_NAME

    @property
    def state_dir(self) -> Path:
        return self._directory / "state"

    @property
    def client(self) -> Client:
        return Client(Endpoint(socket=self.socket), 5.0)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when it is ready. Raises InferdError, with the end of its log, if that does not come."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        words = ["serve", self._model, "--port", str(self._port), "--config", str(self._directory / "settings.toml")]
        words += ["--served-model-name", NAME, "--max-num-seqs", "16", "--memory-limit", "2GiB"]
        words += [word for drill in self.drills for word in ("--drill", drill)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("INFERD_", "OTEL_"))}
        own = {"RUNTIME_DIRECTORY": str(self.socket.parent), "STATE_DIRECTORY": str(self.state_dir)}
        env = {**kept, **own, "INFERD_TUNER": "false", **self._more}
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from daemon.cli import main; main()", *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env,
            )  # fmt: skip
        end = time.monotonic() + _START_SECONDS
        while not self.ready():
            if not self.alive or time.monotonic() > end:
                raise InferdError(f"the scratch daemon did not get ready: {self.log_end()}", "try it with inferd serve")
            time.sleep(0.1)

    def ready(self) -> bool:
        """The engine serves."""
        try:
            state = self.client.snapshot(["state"]).state
        except ClientError:
            return False
        return state is not None and state.daemon == "ready" and state.engine == "ready"

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that is not heard."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def log_end(self) -> str:
        """Its last words, in one line."""
        lines = (self._directory / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-_LOG_LINES:]) or "it said nothing"

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Clients that ask again and again, whatever comes of it, until left."""
        over = threading.Event()
        threads = [threading.Thread(target=self._ask, args=(n, over), daemon=True) for n in range(_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()

    def _ask(self, number: int, over: threading.Event) -> None:
        over.wait(0.13 * number)  # not all in step
        count = 0
        while not over.is_set():
            count += 1
            body = {"model": NAME, "prompt": f"{number}{count % 97:02}ab", "max_tokens": 40, "ignore_eos": True}
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_REQUEST_SECONDS)
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
                good = connection.getresponse().status == http.client.OK
            except (OSError, http.client.HTTPException):
                good = False
            finally:
                connection.close()
            self.answered += good
            over.wait(0.0 if good else 0.2)
