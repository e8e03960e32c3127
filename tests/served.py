"""A real daemon in a process of its own, for tests: started, waited for, asked over its sockets, and always ended.

Owns the process and its directories; knows only what an operator knows: the command line, the ports, the control
socket. Enter at `Served`.
"""

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
INFERD = [sys.executable, "-c", "import sys; from daemon.cli import main; sys.argv[0] = 'inferd'; sys.exit(main())"]


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now; of those that the kernel gives nobody by itself, so that no
    other process's connection has it by the time it is used."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(first - 10_000, first)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The first truthy value of `condition`, asked every 20 ms; fails with `what` after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.02)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Served:
    """`inferd serve MODEL ARGS` under private runtime and state directories; the model cache is the user's own."""

    def __init__(
        self,
        directory: Path,
        model: str,
        *args: str,
        ready_s: float = 120.0,
        env: dict[str, str] | None = None,
        command: Sequence[str] = INFERD,
    ) -> None:
        self.directory = directory
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.runtime = directory / "run"
        self.state = directory / "state"
        self.log_path = directory / "daemon.log"
        self.runtime.mkdir(parents=True, exist_ok=True)
        self.state.mkdir(parents=True, exist_ok=True)
        self._args = [*command, "serve", model, "--port", str(self.port), *args]
        self._env = {
            **os.environ,
            "RUNTIME_DIRECTORY": str(self.runtime),
            "STATE_DIRECTORY": str(self.state),
            "PYTHONPATH": str(ROOT),
            **(env or {}),
        }
        self._patience_s = ready_s
        self.ready_s = 0.0  # from exec to the first 200 of /health/ready
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, wait: bool = True) -> "Served":
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self._args, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._env, cwd=ROOT
            )
        began = time.monotonic()
        if wait:
            self.wait_ready(self._patience_s)
            self.ready_s = time.monotonic() - began
        return self

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def engine_pid(self) -> int:
        """The living engine's. Raises AssertionError unless there is just one."""
        (pid,) = self.engine_pids()
        return pid

    def engine_pids(self) -> list[int]:
        """Living engine processes that this daemon started."""
        if not psutil.pid_exists(self.pid):
            return []
        children = psutil.Process(self.pid).children(recursive=True)
        return [c.pid for c in children if "engine.process" in c.cmdline()]

    def get(self, path: str, timeout_s: float = 60.0) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> tuple[int, Any]:
        status, answer = self.post_raw(path, body, timeout_s)
        return status, json.loads(answer)

    def post_raw(self, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> tuple[int, bytes]:
        """The answer as it came: a stream of events, say."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def control(self, path: str, method: str = "GET", body: Any = None, timeout_s: float = 60.0) -> tuple[int, bytes]:
        """Ask the control socket."""
        connection = _UnixConnection(self.runtime / "control.sock", timeout_s)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def snapshot(self, include: str = "") -> dict[str, Any]:
        status, body = self.control("/inferd/v1/snapshot" + (f"?include={include}" if include else ""))
        assert status == 200, body
        value: dict[str, Any] = json.loads(body)
        return value

    def ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the daemon ended with {self.process.returncode}:\n{self.log[-4000:]}")
        try:
            return self.get("/health/ready", timeout_s=2)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def wait_ready(self, timeout_s: float) -> None:
        try:
            wait_for(self.ready, timeout_s, "ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log[-4000:]}") from error

    def stop(self, timeout_s: float = 90.0) -> int:
        """SIGTERM, then wait; SIGKILL after `timeout_s`. The exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode

    def __enter__(self) -> "Served":
        try:
            return self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process is not None:
            self.stop()
