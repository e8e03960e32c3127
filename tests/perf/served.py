"""A daemon for perf scripts: started as a user would, found ready, watched, drained. Torch-free."""

import os
import signal
import socket
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

from tests.perf.harness import REPO

_READY_S = 120.0
INFERD = [sys.executable, "-c", "import sys; from daemon.cli import main; sys.argv[0] = 'inferd'; sys.exit(main())"]


@dataclass(frozen=True)
class Served:
    """One running daemon. `ready_s` = from exec to the first 200 of /health/ready."""

    url: str
    pid: int
    ready_s: float
    log: Path

    def engine_pid(self) -> int:
        """The child that runs the engine: the one with the most memory."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return max((int(c) for c in children), key=rss_bytes)


def rss_bytes(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=1) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def serving(*flags: str, model: str = "smollm2", env: Mapping[str, str] | None = None) -> Iterator[Served]:
    """`inferd serve MODEL FLAGS…` on a free port, with state of its own; `env` adds variables. Raises RuntimeError with
    the end of its log if it does not get ready, or does not end in order."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="inferd-perf-") as folder:
        log = Path(folder) / "log"
        home = {name: str(Path(folder) / name.lower()) for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR")}
        for path in home.values():
            Path(path).mkdir(mode=0o700)
        began = time.perf_counter()
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*INFERD, "serve", model, "--port", str(port), *flags],
                cwd=REPO,
                env={**os.environ, **home, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            while not is_ready(url):
                if process.poll() is not None or time.perf_counter() - began > _READY_S:
                    raise RuntimeError(f"inferd serve did not get ready:\n{log.read_text()[-2000:]}")
                time.sleep(0.02)
            yield Served(url, process.pid, time.perf_counter() - began, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise RuntimeError(f"inferd serve did not drain within 30 s:\n{log.read_text()[-2000:]}") from None
