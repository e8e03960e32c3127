"""The engine process: `python -m engine.process`, started by exec from the daemon (daemon/session.py), never by fork.

Owns the process: its boot message, its ties to the daemon, its exit code. It must not know HTTP or text. Enter at
`main`; the order of a life is boot → guard → load → Ready → serve (engine/server.py) → Ended (or Fault) → exit.

How it ends: by the daemon's word (Drain, Shutdown); by a fault (the Fault message's exit code); and within moments of
the daemon's death whatever it is doing, because the kernel kills it with its parent (PR_SET_PDEATHSIG) and because a
thread waits for the end of the pipe that is its standard input. SIGINT and SIGTERM are ignored: a terminal and a
service manager send them to the whole group, and it is the daemon that drains.
"""

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine import wire
from engine.autopsy import Autopsy, Readings
from engine.books import Accounts, Books, NoBooks
from engine.budget import Limits, Resolved
from engine.config import EngineConfig
from engine.errors import EngineFault, InferdError, OutOfMemory
from engine.features import parts
from engine.loop import Engine
from engine.outbox import Outbox
from engine.plan import Runner
from engine.pulse import Pulse
from engine.scheduler import Scheduler
from engine.server import Faults, Link, Server
from engine.stepcost import Ceilings, StepMeter
from telemetry.events import Event, encode
from telemetry.recorder import Recorder, ring_bytes

_PR_SET_PDEATHSIG = 1
RING = "engine.ring"  # in the state directory
_ORPHANED = 70  # exit code when the daemon is gone: nobody is left to read it


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What loading a model yields. `cache_root` salts the prefix cache; `phases` are stages of start-up in ns; `books`
    say who has which bytes."""

    resolved: Resolved
    limits: Limits
    runner: Runner
    phases: dict[str, int]
    cache_root: str
    books: Accounts = field(default_factory=NoBooks)
    bandwidth_bytes_per_ns: float = 0.0  # of the device's memory, as measured at start; 0 = was not
    faults: Faults | None = None
    readings: Callable[[], Readings | None] = lambda: None  # of memory, now


Load = Callable[[EngineConfig, Callable[[str, float], None]], Loaded]


def main(load: Load | None = None) -> None:
    """Live one engine's life and exit. `load` replaces the model (tests); the rest is the real thing."""
    begun_ns = time.monotonic_ns()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    boot = msgspec.json.decode(_first_line(0), type=wire.Boot)
    guard(boot.daemon_pid)
    if boot.stacks_fd >= 0:
        faulthandler.register(signal.SIGUSR1, file=boot.stacks_fd, all_threads=True)
    pulse = Pulse.attach(boot.pulse_fd)
    with Link(boot.commands, boot.telemetry) as link:
        try:
            config = EngineConfig.from_dict(boot.config)
            with _recorder(config, boot.engine_id) as recorder:  # an exception leaves it without the clean-end mark
                code = _start(config, link, recorder, load or load_model, pulse, begun_ns).run()
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
        faults=started.faults,
        readings=started.readings,
        cache_root=f"{manifest.digest}/{started.resolved.kv_dtype}/{started.resolved.block_size}",
        books=Books(
            started.ledger,
            started.resolved.device,
            limit_bytes=started.resolved.memory_limit_bytes,
            activation_bytes=started.resolved.activation_bytes,
            pool=started.pool,
            model_dir=Path(config.model_dir),
        ),
        bandwidth_bytes_per_ns=started.bandwidth_bytes_per_ns,
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


def _recorder(config: EngineConfig, engine_id: str) -> AbstractContextManager[Recorder | None]:
    """The flight recorder's ring in the state directory; none without one."""
    if config.state_dir is None:
        return contextlib.nullcontext()
    recorder = Recorder.open(Path(config.state_dir) / RING, engine_id, ring_bytes(config.max_num_seqs or 256))
    if not recorder.durable:
        print(f"the flight recorder does not survive this process: {recorder.why_not_durable}", file=sys.stderr)
    return recorder


def _start(
    config: EngineConfig, link: Link, recorder: Recorder | None, load: Load, pulse: Pulse, begun_ns: int
) -> Server:
    loaded = load(config, lambda stage, share: print(f"loading: {stage} {share:.0%}", file=sys.stderr))
    loaded_ns = time.monotonic_ns()
    scheduler = Scheduler(
        loaded.resolved,
        loaded.limits,
        cache_root=loaded.cache_root,
        output_credit=config.output_credit,
        parts=parts(config.without),
    )
    outbox = Outbox(link.post)
    publish = outbox.put if recorder is None else _recorded(recorder, outbox)
    resolved = loaded.resolved
    ceilings = Ceilings(
        bytes_per_ns=loaded.bandwidth_bytes_per_ns,
        weights_bytes=resolved.weights_bytes,
        context_token_bytes=resolved.kv_block_bytes // resolved.block_size,
    )
    engine = Engine(
        scheduler,
        loaded.runner,
        publish,
        pulse=pulse,
        autopsy=Autopsy(resolved.activation_bytes, loaded.readings),
        meter=StepMeter(ceilings),
    )
    gc.freeze()  # what was loaded stays for ever: no collection needs to walk it during a step
    ready_ns = time.monotonic_ns()
    phases = {  # in their order, and they sum to the total; torch's import is most of the boot
        "boot": loaded_ns - begun_ns - sum(loaded.phases.values()),
        **loaded.phases,
        "engine": ready_ns - loaded_ns,
        "total": ready_ns - begun_ns,
    }
    link.send(wire.Ready(pid=os.getpid(), resolved=loaded.resolved, limits=loaded.limits, phases=phases))
    return Server(engine, link, outbox, resolved, loaded.limits, loaded.books, publish, loaded.faults)


def _recorded(recorder: Recorder, outbox: Outbox) -> Callable[[Event], None]:
    """Into the ring at once, because the next moment may be the last; then on its way to the daemon."""

    def publish(event: Event) -> None:
        recorder.append(encode(event))
        outbox.put(event)

    return publish


def _report(link: Link, error: Exception) -> int:
    """Say why to the daemon and, for what nobody foresaw, to the log as a traceback. Returns the exit code."""
    if isinstance(error, InferdError):
        code = OutOfMemory.code if isinstance(error.__cause__, OutOfMemory) else error.code
        exit_code, message, hint = error.exit_code, error.message, error.hint
    else:
        with contextlib.suppress(MemoryError):  # it may be what this is about
            traceback.print_exc()
        code, exit_code, hint = "internal_error", EngineFault.exit_code, "the engine's log has the traceback"
        message = f"{type(error).__name__}: {error}"
    link.send(wire.Fault(code=code, message=message, hint=hint, exit_code=exit_code))
    return exit_code


if __name__ == "__main__":
    main()
