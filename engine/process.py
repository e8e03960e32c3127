"""The engine process: `python -m engine.process`, started by exec from the daemon (daemon/session.py), never by fork.

Owns the process: its boot message, its two sockets, its heartbeat, its end. It must not know HTTP or text. Enter at
`main`; the order of a life is boot → guard → load → Ready → serve → Ended (or Fault) → exit.

How it ends: by the daemon's word (Drain, Shutdown); by a fault (the Fault message's exit code); and within moments of
the daemon's death whatever it is doing, because the kernel kills it with its parent (PR_SET_PDEATHSIG) and because a
thread waits for the end of the pipe that is its standard input. SIGINT and SIGTERM are ignored: a terminal and a
service manager send them to the whole group, and it is the daemon that drains.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import zmq

from engine import wire
from engine.budget import Limits, Resolved
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineFault, InferdError, OutOfMemory
from engine.loop import Engine
from engine.outbox import Outbox
from engine.plan import Runner
from engine.request import FinishReason, Output
from engine.scheduler import Scheduler
from telemetry.events import EngineStatus, LimitsView

_PR_SET_PDEATHSIG = 1
_HEARTBEAT_NS = 1_000_000_000
_LINGER_MS = 1000
_ORPHANED = 70  # exit code when the daemon is gone: nobody is left to read it


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What loading a model yields. `cache_root` salts the prefix cache; `phases` are stages of start-up in ns."""

    resolved: Resolved
    limits: Limits
    runner: Runner
    phases: dict[str, int]
    cache_root: str


Load = Callable[[EngineConfig, Callable[[str, float], None]], Loaded]


def main(load: Load | None = None) -> None:
    """Live one engine's life and exit. `load` replaces the model (tests); the rest is the real thing."""
    begun_ns = time.monotonic_ns()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    boot = msgspec.json.decode(_first_line(0), type=wire.Boot)
    guard(boot.daemon_pid)
    with Link(boot.commands, boot.telemetry) as link:
        try:
            server = _start(boot, link, load or load_model, begun_ns)
            code = server.run()
        except Exception as error:  # noqa: BLE001 - the process's last resort: it is reported, then the process ends
            code = _report(link, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not by way of finalizers: a device library's may hang, and there is nothing left to save


def load_model(config: EngineConfig, progress: Callable[[str, float], None]) -> Loaded:
    """The real model: the device plane, and with it torch, is imported here and nowhere else."""
    from engine.device.start import start
    from engine.manifest import Manifest

    manifest = Manifest.load(config.model_dir)
    started = start(config, manifest, Path(config.model_dir), progress)
    return Loaded(
        resolved=started.resolved,
        limits=started.limits,
        runner=started.runner,
        phases=started.phases,
        cache_root=f"{manifest.digest}/{started.resolved.kv_dtype}/{started.resolved.block_size}",
    )


def guard(daemon_pid: int) -> None:
    """Tie this process's life to the daemon's, and let the kernel choose this one first when memory is short."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != daemon_pid:  # it died before the line above
        os._exit(_ORPHANED)
    threading.Thread(target=_exit_at_end_of, args=(0,), name="daemon-watch", daemon=True).start()
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # no such file outside Linux; raising one's own score is always allowed on it
        score.write_text(str(min(1000, int(score.read_text()) + 300)))


def _exit_at_end_of(descriptor: int) -> None:
    while os.read(descriptor, 4096):
        pass
    os._exit(_ORPHANED)


def _first_line(descriptor: int) -> bytes:
    """Unbuffered, because a thread goes on reading the descriptor."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(descriptor, 1)
        if not piece:
            os._exit(_ORPHANED)
        line += piece
    return bytes(line)


def _start(boot: wire.Boot, link: "Link", load: Load, begun_ns: int) -> "Server":
    config = EngineConfig.from_dict(boot.config)
    loaded = load(config, lambda stage, share: print(f"loading: {stage} {share:.0%}", file=sys.stderr))
    scheduler = Scheduler(
        loaded.resolved, loaded.limits, cache_root=loaded.cache_root, output_credit=config.output_credit
    )
    outbox = Outbox(link.post)
    engine = Engine(scheduler, loaded.runner, outbox.put)
    phases = {**loaded.phases, "total": time.monotonic_ns() - begun_ns}
    link.send(wire.Ready(pid=os.getpid(), resolved=loaded.resolved, limits=loaded.limits, phases=phases))
    return Server(engine, link, outbox, loaded)


def _report(link: "Link", error: Exception) -> int:
    """Say why to the daemon and, for what nobody foresaw, to the log as a traceback. Returns the exit code."""
    if isinstance(error, InferdError):
        code = OutOfMemory.code if isinstance(error.__cause__, OutOfMemory) else error.code
        exit_code, message, hint = error.exit_code, error.message, error.hint
    else:
        traceback.print_exc()
        code, exit_code, hint = "internal_error", EngineFault.exit_code, "the engine's log has the traceback"
        message = f"{type(error).__name__}: {error}"
    link.send(wire.Fault(code=code, message=message, hint=hint, exit_code=exit_code))
    return exit_code


class Link:
    """The engine's ends of the two sockets."""

    def __init__(self, commands: str, telemetry: str) -> None:
        self._context = zmq.Context()
        self._commands = self._socket(zmq.PAIR, commands, high_water=0)
        self._telemetry = self._socket(zmq.PUSH, telemetry, high_water=64)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self._telemetry.close(linger=0)
        self._commands.close(linger=_LINGER_MS)
        self._context.term()

    def _socket(self, kind: int, endpoint: str, high_water: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(high_water)
        socket.connect(endpoint)
        return socket

    def send(self, reply: wire.Reply) -> None:
        """Lossless. Never blocks: the queue is unlimited, and bounded by each request's output credit."""
        self._commands.send(wire.encode(reply))

    def post(self, frame: bytes) -> bool:
        """One telemetry frame, if there is room for it now."""
        try:
            self._telemetry.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def received(self, patience_ms: int) -> Iterator[bytes]:
        """Every frame that is there; waits at most `patience_ms` for the first."""
        if patience_ms and not self._commands.poll(patience_ms):
            return
        while True:
            try:
                yield self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return


class Server:
    """Obeys commands and steps the engine while there is work; sleeps in poll when there is none."""

    def __init__(self, engine: Engine, link: Link, outbox: Outbox, loaded: Loaded) -> None:
        self._engine = engine
        self._link = link
        self._outbox = outbox
        self._ceilings = loaded.resolved
        self._limits = loaded.limits
        self._state = "ready"
        self._over = False
        self._bad_commands = 0
        self._next_beat_ns = 0

    def run(self) -> int:
        """Until a Drain is complete or a Shutdown came. Returns the exit code."""
        while not self._over:
            self._beat()
            for frame in self._link.received(self._patience_ms()):
                self._receive(frame)
            if self._engine.has_work:
                self._give(self._engine.step())
            self._outbox.flush()
            if self._state == "draining" and not self._engine.has_work:
                self._over = True
        self._engine.close()
        self._link.send(wire.Ended())
        return 0

    def _patience_ms(self) -> int:
        """How long nothing can happen unless a command comes."""
        engine = self._engine
        if engine.has_work and not engine.starved:
            return 0
        now_ns = time.monotonic_ns()
        until_ns = self._next_beat_ns
        deadline_ns = engine.scheduler.next_deadline_ns
        if deadline_ns:
            until_ns = min(until_ns, deadline_ns)
        return max(1, (until_ns - now_ns) // 1_000_000)

    def _give(self, outputs: list[Output]) -> None:
        if outputs:
            self._link.send(wire.Outputs(outputs=outputs))

    def _receive(self, frame: bytes) -> None:
        """One command. A frame that is none, or one that raises, is said and counted and changes nothing."""
        try:
            self._obey(wire.decode_command(frame))
        except (EngineFault, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - no command may end the engine under everybody else
            self._bad_commands += 1
            print(f"a command was dropped: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def _obey(self, command: wire.Command) -> None:
        match command:
            case wire.Submit(requests):
                self._give(self._engine.submit(requests))
            case wire.Cancel(request_ids, reason):
                self._give(self._engine.cancel(request_ids, FinishReason(reason)))
            case wire.Ack(taken):
                self._engine.ack(taken)
            case wire.SetLimits(limits):
                self._set_limits(limits)
            case wire.Ask(token, part):
                self._link.send(wire.Answer(token=token, value=self._part(part)))
            case wire.Act(token, action):
                self._link.send(wire.Answer(token=token, value=self._act(action)))
            case wire.Drain():
                self._state = "draining"
            case wire.Shutdown():
                self._give(self._engine.abort_all())
                self._over = True

    def _set_limits(self, limits: Limits) -> None:
        refused = ""
        try:
            self._engine.set_limits(limits.within(self._ceilings))
            self._limits = limits
        except ConfigError as error:
            refused = str(error)
        self._link.send(wire.LimitsSet(limits=self._limits, refused=refused))

    def _part(self, part: str) -> object:
        """Plain data, or None for a part that this engine does not report."""
        match part:
            case "requests":
                return [msgspec.to_builtins(view) for view in self._engine.scheduler.views()]
            case "blocks":
                return self._engine.scheduler.block_map()
            case "sizes":
                return self._sizes()
            case "memory":
                return {"rss_bytes": _rss_bytes()}
        return None

    def _act(self, action: str) -> object:
        if action == "reset_cache":
            return {"blocks": self._engine.scheduler.reset_cache()}
        return None

    def _sizes(self) -> dict[str, int]:
        return {**self._engine.sizes(), "outbox": len(self._outbox), "bad_commands": self._bad_commands}

    def _beat(self) -> None:
        """EngineStatus, once a second, also when idle. It doubles as the sign of life."""
        now_ns = time.monotonic_ns()
        if now_ns < self._next_beat_ns:
            return
        self._next_beat_ns = now_ns + _HEARTBEAT_NS
        if not self._engine.has_work:
            self._engine.progress_ns = now_ns
        facts = self._engine.scheduler.state_facts()
        self._outbox.put(
            EngineStatus(
                at_ns=now_ns,
                state=self._state,
                progress_ns=self._engine.progress_ns,
                steps=self._engine.steps,
                limits=LimitsView(**asdict(self._limits)),
                sizes=self._sizes(),
                cpu_ns=time.process_time_ns(),
                rss_bytes=_rss_bytes(),
                running=facts.running,
                waiting=facts.waiting,
                kv_active=facts.kv_active,
                kv_cached=facts.kv_cached,
                kv_free=facts.kv_free,
                telemetry_dropped=self._outbox.dropped,
            )
        )
        self._outbox.flush()


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
