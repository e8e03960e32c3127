"""Replays: a recording as a feed, with pause and seek: a journal, a flight recorder's ring, an incident's bundle, a
state directory, or a recorded feed.

Owns reading them and their time. Events are folded by the daemon's own fold, so that a recording shows the figures that
the daemon would have shown; a recorded feed has its snapshots too, with what only the engine knew. It must not know
what is done with a frame. Enter at `Replay`, `load` and `last`.
"""

import itertools
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from telemetry import events, journal
from telemetry import snapshot as snapshots
from telemetry.casefile import Bundle
from telemetry.client import ClientError
from telemetry.events import Event
from telemetry.fold import Fold
from telemetry.recorder import read_ring
from telemetry.snapshot import Snapshot, Views
from tui.text import clock, duration
from tui.view import Frame

_TICK_S: Final = 1.0
_HEAD_BYTES: Final = 64  # in which a line says what it is
_REBOOT_NS: Final = 3600 * 1_000_000_000  # a clock that fell so far is that of another boot
_RECORDINGS: Final = ("journal.jsonl", "*.ring", "*.ring.previous")  # of a state directory


class Unreadable(Exception):
    """The file is none of the recordings that are known, or holds nothing."""


class RecordedSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a recorded feed that is no event: the snapshot that was had at that time."""

    unix_seconds: float
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that was recorded, on the wall clock."""

    unix_seconds: float
    event: Event | None = None
    snapshot: Snapshot | None = None


def load(path: Path) -> list[Moment]:
    """What `path` holds, oldest first. Raises Unreadable."""
    try:
        moments = sorted(_read(path), key=lambda moment: moment.unix_seconds)
    except OSError as error:
        raise Unreadable(f"cannot read {path}: {error.strerror or error}") from error
    if not moments:
        raise Unreadable(f"{path} holds no journal line, ring record, bundle or recorded feed")
    return moments


def _read(path: Path) -> Iterator[Moment]:
    if path.is_dir():
        yield from _directory(path)
    elif path.suffix == ".ring" or path.name.endswith(".ring.previous"):
        yield from _ring(path)
    elif path.suffix == ".json":
        yield from _bundle(path)
    else:
        yield from _lines(path)


def _directory(path: Path) -> Iterator[Moment]:
    """A state directory: its journal and its rings. What the journal has, the daemon's ring has again."""
    seen: set[tuple[str, int]] = set()
    for name in _RECORDINGS:
        for found in sorted(path.rglob(name)):
            for moment in _read(found):
                assert moment.event is not None
                mark = (type(moment.event).__name__, moment.event.at_ns)
                if mark not in seen:
                    seen.add(mark)
                    yield moment


def _lines(path: Path) -> Iterator[Moment]:
    """A journal with its older files, or a recorded feed."""
    yield from (Moment(line.unix_seconds, event=line.event) for line in journal.read(path))
    with path.open("rb") as lines:
        for text in lines:
            if b'"snapshot":' in text[:_HEAD_BYTES]:
                found = msgspec.json.decode(text, type=RecordedSnapshot)
                yield Moment(found.unix_seconds, snapshot=found.snapshot)


def _ring(path: Path) -> Iterator[Moment]:
    try:
        ring = read_ring(path)
    except ValueError as error:
        raise Unreadable(str(error)) from error
    for _, payload in ring.records:
        try:
            event = events.decode(payload)
        except msgspec.DecodeError:  # of a later version
            continue
        yield Moment((ring.started_unix_ns + event.at_ns - ring.started_ns) / 1e9, event=event)


def _bundle(path: Path) -> Iterator[Moment]:
    """The steps, decisions and the fault that a bundle holds."""
    try:
        bundle = msgspec.json.decode(path.read_bytes(), type=Bundle)
    except msgspec.DecodeError as error:
        raise Unreadable(f"{path} is no bundle: {error}") from error
    incident = events.Incident(
        at_ns=bundle.at_ns,
        incident_id=bundle.incident_id,
        kind=bundle.kind,
        cause=bundle.cause,
        summary=bundle.summary,
        bundle=str(path),
    )
    for event in (*bundle.steps, *bundle.decisions, incident):
        yield Moment(bundle.unix_seconds + (event.at_ns - bundle.at_ns) / 1e9, event=event)


class Player:
    """What is known at a time of a recording, going on or from its start."""

    def __init__(self, moments: list[Moment]) -> None:
        self.moments = moments
        self.stamps = [moment.unix_seconds for moment in moments]
        self.first, self.end = self.stamps[0], self.stamps[-1]
        self._restart()

    def _restart(self) -> None:
        self._done = 0
        self._fold_life(0)
        self._recorded: Snapshot | None = None

    def _fold_life(self, at_ns: int) -> None:
        """A daemon's stamps begin anew with each boot, and so does what is folded."""
        self._last_ns, self._now_ns, self._at = at_ns, at_ns, self.first
        self._fold = Fold("", clock=lambda: self._now_ns)

    def frames(self, until: float, at_ns: int) -> list[Frame]:
        """What came since the last call; the last frame has the state at `until`."""
        end = bisect_right(self.stamps, until)
        if end < self._done:
            self._restart()
        fresh = self.moments[self._done : end]
        self._done = end
        taken: list[Event] = []
        for moment in fresh:
            if moment.snapshot is not None:
                self._recorded = _merged(self._recorded, moment.snapshot)
            if moment.event is not None:
                self._take(moment.event, moment.unix_seconds)
                taken.append(moment.event)
        label = f"replay {clock(until)} UTC, {duration(max(0.0, self.end - until))} left"
        shown = self._recorded or self._state(until)
        return [Frame(at_ns=at_ns, snapshot=shown, events=tuple(taken), label=label)]

    def _take(self, event: Event, unix: float) -> None:
        if event.at_ns < self._last_ns - _REBOOT_NS:
            self._fold_life(event.at_ns)
        self._last_ns = max(self._last_ns, event.at_ns)
        self._at = unix + (self._last_ns - event.at_ns) / 1e9
        self._now_ns = self._last_ns
        self._fold.take([event])

    def _state(self, until: float) -> Snapshot:
        self._now_ns = self._last_ns + max(0, int((until - self._at) * 1e9))
        return snapshots.build(self._fold, None, Views(wall=lambda: until))


def _merged(before: Snapshot | None, given: Snapshot) -> Snapshot:
    """A recorded feed repeats only what changes: a part that is not there is as it was."""
    if before is None:
        return given
    kept = {name: getattr(before, name) for name in Snapshot.__struct_fields__ if getattr(given, name) is None}
    return msgspec.structs.replace(given, **kept)


def last(path: Path) -> Snapshot:
    """The state at the end of a recording. Raises Unreadable."""
    player = Player(load(path))
    (frame,) = player.frames(player.end, 0)
    assert frame.snapshot is not None
    return frame.snapshot


class Replay:
    """A recording that plays in its own time; nothing can be done to its daemon."""

    replayed = True

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._player = Player(load(path))
        self._path = path
        self._now = now
        self._at = self._player.first
        self._paused = False
        self._over = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()

    def start(self, deliver: Callable[[Frame], None]) -> None:
        threading.Thread(target=self._play, args=(deliver,), name="top-replay", daemon=True).start()

    def stop(self) -> None:
        self._over.set()
        self._wake.set()

    def want(self, parts: frozenset[str]) -> None: ...

    def post(self, path: str, body: Any = None) -> Any:
        raise ClientError("this is a recording: there is no daemon to act on")

    def seek(self, seconds: float) -> None:
        with self._lock:
            self._at = min(self._player.end, max(self._player.first, self._at + seconds))
        self._wake.set()

    def pause(self, paused: bool) -> None:
        self._paused = paused
        self._wake.set()

    def _play(self, deliver: Callable[[Frame], None]) -> None:
        before = self._now()
        for _ in itertools.count():
            for frame in self._player.frames(self._at, time.monotonic_ns()):
                deliver(frame)
            self._wake.wait(_TICK_S)
            self._wake.clear()
            if self._over.is_set():
                return
            now = self._now()
            if not self._paused:
                with self._lock:
                    self._at = min(self._player.end, self._at + now - before)
            before = now
