"""EngineLife: one engine process from exec to its end, with its pipe, its two sockets and its last words.

It owns these resources and gives every one of them back when `run` returns; it must not know streams, restarts or
limits. Enter at `run`, which returns how the process ended and never raises for it.

The commands socket is read on the event loop through its descriptor: no task and no thread hop per message. ZeroMQ's
descriptor is edge-triggered, so whoever touches the socket reads until nothing is left. The telemetry socket is read by
a thread of its own, so that events are never on the way of tokens.
"""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from engine import environment as engine_environment
from engine import wire
from engine.config import EngineConfig
from engine.errors import ConfigError, DoesNotFit, EngineFault, InferdError, ModelError, OutOfMemory
from engine.pulse import Beat, Pulse
from telemetry import probe
from telemetry.events import Event
from telemetry.threads import name_this_thread

log = logging.getLogger("inferd.engine")

_LAST_LINES = 40
_UNFORESEEN = (InferdError.code, EngineFault.code)
# What Python, C++ and ZeroMQ say last when they cannot get memory.
_LACKED = r"MemoryError|bad_alloc|(?i:out of memory)|Cannot allocate memory"
_KILLED_HERE = {
    "killed": "killed by the daemon, as it did not end by itself",
    "wedged": "killed by the daemon, as it made no progress",
}
_MOST_STACK_BYTES = 1 << 20
_ENDPOINT_BYTES = 100  # of the 108 that a unix socket's path may have


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How an engine ended. `cause` is one of telemetry.events.INCIDENT_CAUSES; `orderly`: it said so itself."""

    cause: str
    detail: str
    exit_code: int  # negative: killed by that signal
    orderly: bool = False
    fault: wire.Fault | None = None
    last_lines: tuple[str, ...] = ()
    oom_kills: int | None = None  # by how many the kernel's counter has moved; None: nobody counts
    killed_here: bool = False
    lacked_memory: bool = False  # by its last words: nobody in it could report that any more
    phase: str = ""  # what it was last seen at

    @classmethod
    def of(
        cls,
        exit_code: int,
        *,
        oom_kills: int | None = None,
        said_its_end: bool = False,
        killed_here: str = "",
        phase: str = "",
        fault: wire.Fault | None = None,
        last_lines: tuple[str, ...] = (),
    ) -> "Death":
        """Tell a kill from a crash from an orderly end. `killed_here`: the cause for which the daemon killed it."""
        orderly = said_its_end and exit_code == 0
        foreseen = fault is not None and fault.code not in _UNFORESEEN
        cause, detail = "crash", f"exit code {exit_code}"
        if orderly:
            cause, detail = "drained", "it finished its work"
        elif exit_code == -signal.SIGKILL and killed_here:
            cause, detail = killed_here, _KILLED_HERE[killed_here]
        elif exit_code == -signal.SIGKILL and oom_kills:
            cause, detail = "oom_killed", "killed by the kernel: out of memory"
        elif exit_code == -signal.SIGKILL:
            cause, detail = "killed", "killed (SIGKILL)"
        elif exit_code < 0:
            detail = f"killed by {signal.Signals(-exit_code).name}"
        elif fault is not None:
            cause = "oom" if fault.code == OutOfMemory.code else "crash"
            detail = fault.message
        elif last_lines:
            detail += f", last words: {last_lines[-1]}"
        lacked = cause == "crash" and not foreseen and re.search(_LACKED, "\n".join((detail, *last_lines))) is not None
        if lacked:
            cause = "oom"
        return cls(
            cause=cause,
            detail=detail,
            exit_code=exit_code,
            orderly=orderly,
            fault=fault,
            last_lines=last_lines,
            oom_kills=oom_kills,
            killed_here=bool(killed_here),
            lacked_memory=lacked,
            phase=phase,
        )

    def error(self) -> InferdError:
        """The same as an error for whoever waits for the engine."""
        if self.fault is None:
            return EngineFault(f"the engine ended: {self.detail}")
        kinds: dict[int, type[InferdError]] = {
            ConfigError.exit_code: ConfigError,
            ModelError.exit_code: ModelError,
            DoesNotFit.exit_code: DoesNotFit,
        }
        return kinds.get(self.fault.exit_code, EngineFault)(self.fault.message, self.fault.hint)


class EngineLife:
    """`on_reply` is called on the loop, `on_events` in the telemetry thread."""

    def __init__(
        self,
        config: EngineConfig,
        runtime_dir: Path,
        on_reply: Callable[[wire.Reply], None],
        on_events: Callable[[Sequence[Event]], None],
    ) -> None:
        self.engine_id = uuid.uuid4().hex[:8]
        self._config = config
        self._on_reply = on_reply
        self._on_events = on_events
        self._directory = _socket_directory(runtime_dir, self.engine_id)
        self._context = zmq.Context()
        self._commands = self._bind(zmq.PAIR, "c", high_water=0)
        self._telemetry = self._bind(zmq.PULL, "t", high_water=256)
        self._descriptor = int(self._commands.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._process: asyncio.subprocess.Process | None = None
        self._pulse = Pulse.create()
        self._stacks = os.memfd_create("inferd-stacks", os.MFD_CLOEXEC)
        self._exited = asyncio.Event()
        self._over = threading.Event()
        self._killed_here = ""  # the cause for which we did
        self._ended = False
        self._fault: wire.Fault | None = None
        self._last_beat = Beat(0, 0, "loading", 0)
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)

    async def run(self, argv: Sequence[str] | None = None, env: dict[str, str] | None = None) -> Death:
        """Start the process, pass its messages on until it ends, clean up."""
        kills_before = _oom_kills()
        reader = threading.Thread(target=self._read_telemetry, name="engine-telemetry", daemon=True)
        try:
            process = self._process = await self._spawn(argv, env)
            if self._killed_here:  # while it was being started
                process.kill()
            reader.start()
            self._loop.add_reader(self._descriptor, self._drain_commands)
            await asyncio.gather(self._boot(process), self._log_output(process))
            exit_code = await process.wait()
            self._drain_commands()  # its last words
        except OSError as error:
            return Death(cause="crash", detail=f"the engine could not be started: {error}", exit_code=127)
        finally:
            await self._close(reader)
        return Death.of(
            exit_code,
            oom_kills=_moved(kills_before, _oom_kills()),
            said_its_end=self._ended,
            killed_here=self._killed_here,
            phase=self._last_beat.phase,
            fault=self._fault,
            last_lines=tuple(self._last_lines),
        )

    def send(self, command: wire.Command) -> bool:
        """Never blocks. False: the engine is gone (its end is on its way to `run`)."""
        try:
            self._commands.send(wire.encode(command), zmq.NOBLOCK)
        except zmq.ZMQError:  # no peer any more, or the socket is closed
            return False
        # Sending may have swallowed the descriptor's edge for a message that came in meanwhile.
        if int(self._commands.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._drain_commands)
        return True

    async def ended_within(self, seconds: float) -> bool:
        """Wait for the end of the process, but not longer."""
        try:
            await asyncio.wait_for(self._exited.wait(), seconds)
        except TimeoutError:
            return False
        return True

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def beat(self) -> Beat:
        """The engine's pulse. Safe from any thread; after its end the last one."""
        with contextlib.suppress(ValueError):
            self._last_beat = self._pulse.read()
        return self._last_beat

    def read_stacks(self) -> str:
        """All that the engine has written of its stacks (on SIGUSR1) so far."""
        try:
            return os.pread(self._stacks, _MOST_STACK_BYTES, 0).decode(errors="replace")
        except OSError:  # closed: its life is over
            return ""

    def kill(self, cause: str = "killed") -> None:
        """SIGKILL, if it still runs; also takes effect on a process that is only being started."""
        self._killed_here = cause
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _spawn(self, argv: Sequence[str] | None, env: dict[str, str] | None) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(argv or (sys.executable, "-P", "-m", "engine.process")),  # -P: nothing is imported from where we stand
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=env if env is not None else self._environment(),
            pass_fds=(self._pulse.descriptor, self._stacks),
        )

    def _environment(self) -> dict[str, str]:
        """Ours, with our own packages importable and the thread settings that torch reads when it is imported; what
        the user has set himself stays."""
        threads = self._config.threads or len(os.sched_getaffinity(0))
        home = str(Path(engine_environment.__file__).parents[1])
        path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        return {**engine_environment.environment(threads), **os.environ, "PYTHONPATH": path}

    async def _boot(self, process: asyncio.subprocess.Process) -> None:
        boot = wire.Boot(
            config=self._config.to_dict(),
            commands=f"ipc://{self._directory}/c",
            telemetry=f"ipc://{self._directory}/t",
            engine_id=self.engine_id,
            daemon_pid=os.getpid(),
            pulse_fd=self._pulse.descriptor,
            stacks_fd=self._stacks,
        )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died already: its exit says more
            process.stdin.write(msgspec.json.encode(boot) + b"\n")
            await process.stdin.drain()

    async def _log_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # a line longer than the stream's limit: the rest is of no use either
            async for line in process.stdout:
                text = line.decode("utf-8", errors="replace").rstrip()
                self._last_lines.append(text)
                log.info("%s", text)

    def _drain_commands(self) -> None:
        """Every message that is there."""
        while not self._over.is_set():
            try:
                frame = self._commands.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            try:
                reply = wire.decode_reply(frame)
            except msgspec.DecodeError as error:
                log.error("a message of the engine was dropped: %s", error)
                continue
            if isinstance(reply, wire.Fault):
                self._fault = reply
            elif isinstance(reply, wire.Ended):
                self._ended = True
            self._on_reply(reply)

    def _read_telemetry(self) -> None:
        """The telemetry thread: until the life is over and nothing is left to read."""
        name_this_thread("tel-receive")
        while self._telemetry.poll(0 if self._over.is_set() else None):
            frame = self._telemetry.recv()
            if not frame:  # `_wake_reader`
                continue
            try:
                events = wire.decode_events(frame)
            except msgspec.DecodeError as error:
                log.error("a telemetry frame was dropped: %s", error)
                continue
            self._on_events(events)

    def _wake_reader(self) -> None:
        """An empty frame, so that the telemetry thread looks whether the life is over. It sleeps until a frame comes:
        waking to look would cost more than all that it reads."""
        with self._context.socket(zmq.PUSH) as socket:
            socket.connect(f"ipc://{self._directory}/t")
            socket.send(b"")

    def _bind(self, kind: int, name: str, high_water: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(high_water)
        socket.bind(f"ipc://{self._directory}/{name}")
        return socket

    async def _close(self, reader: threading.Thread) -> None:
        self._over.set()
        self._exited.set()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()  # `run` was cancelled
        if reader.ident is not None:
            self._wake_reader()
            await self._loop.run_in_executor(None, reader.join)
        with contextlib.suppress(ValueError):
            self._loop.remove_reader(self._descriptor)
        self._commands.close(linger=0)
        self._telemetry.close(linger=0)
        self._context.term()
        self.beat()  # its last one
        self._pulse.close()
        os.close(self._stacks)
        self._stacks = -1
        shutil.rmtree(self._directory, ignore_errors=True)


def _oom_kills() -> int | None:
    """Processes of our control group that were killed for memory, so far; None where nobody counts."""
    return probe.cgroup().oom_kills


def _moved(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else now - before


def sweep(runtime_dir: Path) -> None:
    """Remove the socket directories that killed daemons left behind."""
    for directory in runtime_dir.glob("engine-*-*"):
        pid = directory.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(directory, ignore_errors=True)


def _socket_directory(runtime_dir: Path, engine_id: str) -> Path:
    """A private directory for the sockets of one life; elsewhere, if the path would be too long for the kernel."""
    directory = runtime_dir / f"engine-{os.getpid()}-{engine_id}"
    if len(os.fsencode(directory)) + 2 > _ENDPOINT_BYTES:
        return Path(tempfile.mkdtemp(prefix="inferd-"))
    directory.mkdir(mode=0o700, parents=True)
    return directory
