"""Gathering: one Evidence from a daemon that answers, or from the files of one that does not.

Owns what is read, and that nothing of it takes long: every source has a limit in time or bytes, and one that fails is
'not reported', with the reason in `missing`. It must not judge. Enter at `live` or `offline`; the daemon's own rounds
use `host` and `dated`.
"""

import fcntl
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from runbooks.evidence import LOOK_BACK_SECONDS, Dated, Evidence, Host, Life, Targets, Trouble
from telemetry import events, journal, probe, recorder, snapshot
from telemetry.client import Client
from telemetry.fold import Fold
from telemetry.snapshot import Snapshot

PAST: Final = (
    events.RequestRecord,
    events.EngineStarted,
    events.EngineEnded,
    events.Incident,
    events.StateChanged,
    events.Decision,
)
JOURNAL_BYTES: Final = 4 << 20
RING_EVENTS: Final = 20_000
_RING, _JOURNAL, _LOCK = "daemon.ring", "journal.jsonl", "lock"


def live(client: Client, targets: Targets | None = None, root: Path = probe.ROOT) -> Evidence:
    """What a daemon says of itself, what its journal remembers, and what the machine says of both. Raises ClientError
    if it does not answer."""
    began = time.monotonic()
    shot = client.snapshot()
    state = shot.state
    directory = Path(state.state_dir) if state is not None and state.state_dir else None
    past, missing = _remembered(directory, shot.unix_seconds)
    known = [*(shot.requests.finished[::-1] if shot.requests else []), *(shot.incidents or [])]
    return Evidence(
        source="live",
        at_ns=shot.at_ns,
        unix_seconds=shot.unix_seconds,
        snapshot=shot,
        past=_merged(past, dated(known, shot.at_ns)),
        host=host(directory, state.engine_pid if state else None, root),
        settings=shot.config,
        targets=targets or Targets(),
        missing=missing,
        gather_seconds=time.monotonic() - began,
    )


def offline(directory: Path, why: str = "", targets: Targets | None = None, root: Path = probe.ROOT) -> Evidence:
    """What a state directory remembers of its last daemon: its flight recorder folded into a snapshot of its last
    moment. `why` no daemon was asked."""
    began = time.monotonic()
    life, seen, missing = _recorded(directory)
    if why:
        missing["snapshot"] = why
    now_ns = max((event.at_ns for event in seen), default=time.monotonic_ns())
    unix = time.time() - (life.silent_seconds if life else 0.0)
    past, unreadable = _remembered(directory, unix)
    return Evidence(
        source="offline",
        at_ns=now_ns,
        unix_seconds=unix,
        snapshot=_folded(seen, now_ns, unix),
        past=_merged(past, dated(seen, now_ns)),
        host=host(directory, None, root),
        life=life,
        targets=targets or Targets(),
        missing={**missing, **unreadable},
        gather_seconds=time.monotonic() - began,
    )


def host(directory: Path | None, engine_pid: int | None, root: Path = probe.ROOT) -> Host:
    """The machine, and the engine's process on it."""
    free = total = None
    if directory is not None:
        try:
            disk = os.statvfs(directory)
            free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        except OSError:
            free = total = None  # gone, or not ours to see: 'not reported'
    stat = _read(root / f"proc/{engine_pid}/stat") if engine_pid else ""
    fields = stat.rpartition(")")[2].split()
    load = _read(root / "proc/loadavg").split()
    return Host(
        cores=len(os.sched_getaffinity(0)),
        load_1m=float(load[0]) if load else None,
        memory=probe.host_memory(root),
        cgroup=probe.cgroup(engine_pid, root),
        state_dir=str(directory) if directory else None,
        disk_free_bytes=free,
        disk_total_bytes=total,
        engine_state=fields[0] if fields else None,
        engine_threads=int(fields[17]) if len(fields) > 17 else None,
    )


def dated(seen: Iterable[events.Event], now_ns: int) -> tuple[Dated, ...]:
    """The events worth remembering among `seen`, of this boot."""
    kept = (Dated(max(0.0, (now_ns - each.at_ns) / 1e9), each) for each in seen if isinstance(each, PAST))
    return tuple(each for each in kept if each.age_seconds <= LOOK_BACK_SECONDS)


def _remembered(directory: Path | None, unix_seconds: float) -> tuple[tuple[Dated, ...], dict[str, str]]:
    """The journal's last half hour."""
    if directory is None:
        return (), {"journal": "the daemon does not say where its state directory is"}
    try:
        lines = journal.tail(directory / _JOURNAL, JOURNAL_BYTES)
    except OSError as error:
        return (), {"journal": f"{directory / _JOURNAL}: {error.strerror or error}"}
    kept = (Dated(max(0.0, unix_seconds - line.unix_seconds), line.event) for line in lines)
    return tuple(d for d in kept if d.age_seconds <= LOOK_BACK_SECONDS and isinstance(d.event, PAST)), {}


def _merged(first: tuple[Dated, ...], more: tuple[Dated, ...]) -> tuple[Dated, ...]:
    """Both, each event once, oldest first."""
    known = {_identity(each.event) for each in first}
    fresh = tuple(each for each in more if _identity(each.event) not in known)
    return tuple(sorted((*first, *fresh), key=lambda each: -each.age_seconds))


def _identity(event: events.Event) -> tuple[str, int, str]:
    name = getattr(event, "request_id", "") or getattr(event, "incident_id", "")
    return type(event).__name__, event.at_ns, str(name)


def _recorded(directory: Path) -> tuple[Life | None, list[events.Event], dict[str, str]]:
    """The flight recorder's newest events."""
    path = directory / _RING
    try:
        ring = recorder.read_ring(path)
    except (OSError, ValueError) as error:
        return None, [], {"recorder": str(getattr(error, "strerror", None) or error)}
    seen = [event for event in (_event(payload) for _, payload in ring.records[-RING_EVENTS:]) if event is not None]
    last_ns = max((event.at_ns for event in seen), default=ring.started_ns)
    last_unix = (ring.started_unix_ns + last_ns - ring.started_ns) / 1e9
    life = Life(
        pid=ring.pid, alive=_held(directory / _LOCK), clean=ring.clean, silent_seconds=max(0.0, time.time() - last_unix)
    )
    return life, seen, {}


def _event(payload: bytes) -> events.Event | None:
    """None for an event of a later version."""
    try:
        return events.decode(payload)
    except msgspec.DecodeError:
        return None


def _folded(seen: list[events.Event], now_ns: int, unix_seconds: float) -> Snapshot:
    models = [event.model for event in seen if isinstance(event, events.RequestRecord)]
    fold = Fold(models[-1] if models else "not reported", clock=lambda: now_ns, wall=lambda: unix_seconds)
    fold.take(seen)
    return snapshot.build(fold, views=snapshot.Views(wall=lambda: unix_seconds))


def _held(path: Path) -> bool:
    """A daemon holds this lock: it dies with its process, whatever ended that."""
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def noted(evidence: Evidence, part: str, why: str) -> Evidence:
    """The same, with one more part that could not be had."""
    return replace(evidence, missing={**evidence.missing, part: why})


def inspected(evidence: Evidence, troubles: tuple[Trouble, ...]) -> Evidence:
    """The same, with what was found about the installation."""
    return replace(evidence, installation=troubles)
