"""The view: a pure fold of the feed into what is shown. No clock, no socket, no terminal.

Owns what is kept between two frames: the latest of each part with its age, live lines of the last minutes, steps,
records, notes, limits over time. Everything is bounded. Enter at `View.take`.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from telemetry import events
from telemetry.events import Event, LimitsView, RequestRecord, RequestView, StepReport
from telemetry.parts import Percentiles
from telemetry.snapshot import Snapshot
from tui.timeline import Timelines

POINTS: Final = 600  # of a live line: ten minutes at one a second
_STEPS: Final = 512
_RECORDS: Final = 512
_NOTES: Final = 256
_SECOND: Final = 1_000_000_000

Note = events.Decision | events.Incident | events.Finding | events.StateChanged | events.EngineEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What one exchange with the source brought, `at_ns` by the viewer's clock. `asked` are the parts that `snapshot`
    answers (empty = all); a frame with an `error` brought nothing else."""

    at_ns: int
    snapshot: Snapshot | None = None
    asked: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    error: str = ""
    label: str = ""  # of a replay: where in the recording this is


@dataclass(slots=True)
class Series:
    """One figure over time, a point a frame; None where it was not reported."""

    values: deque[float | None] = field(default_factory=lambda: deque(maxlen=POINTS))

    def add(self, value: float | None) -> None:
        self.values.append(value)

    def last(self) -> float | None:
        return self.values[-1] if self.values else None


@dataclass(slots=True)
class Rung:
    """The memory ladder at one time."""

    at_ns: int
    owners: dict[str, int]
    used_bytes: int | None
    limit_bytes: int | None


def kv_share(snapshot: Snapshot) -> float | None:
    """Active blocks as a share of those that may be used: the live limit, where it is below the pool."""
    kv, limits = snapshot.kv, snapshot.limits
    if kv is None or kv.active is None:
        return None
    usable = sum(n or 0 for n in (kv.active, kv.cached, kv.free))
    if limits is not None:
        usable = min(usable, limits.kv_blocks)
    return kv.active / usable if usable else None


class View:
    """Everything known of the watched daemon. Stamps of parts and events are the daemon's, `*_ns` of frames ours."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.fresh_ns: int | None = None  # when the last good frame came
        self.now_ns = 0
        self.error = ""
        self.label = ""
        self.series: dict[str, Series] = {}
        self.rungs: deque[Rung] = deque(maxlen=POINTS)
        self.steps: deque[StepReport] = deque(maxlen=_STEPS)
        self.records: OrderedDict[str, RequestRecord] = OrderedDict()
        self.notes: deque[Note] = deque(maxlen=_NOTES)  # oldest first
        self.limits: deque[tuple[int, LimitsView, str]] = deque(maxlen=_NOTES)  # (at_ns, limits, by whom and why)
        self.timelines = Timelines()

    @property
    def age_s(self) -> float | None:
        """Of what is shown."""
        return None if self.fresh_ns is None else max(0.0, (self.now_ns - self.fresh_ns) / _SECOND)

    def unix(self, at_ns: int) -> float | None:
        """The daemon's stamp on the wall clock."""
        known = self.snapshot
        return None if known is None else known.unix_seconds + (at_ns - known.at_ns) / _SECOND

    def live(self) -> list[RequestView] | None:
        """Running and waiting; None when the engine did not say."""
        requests = self.snapshot.requests if self.snapshot else None
        return requests.live if requests else None

    def take(self, frame: Frame) -> None:
        """Fold one frame in."""
        self.now_ns = max(self.now_ns, frame.at_ns)
        if frame.label:
            self.label = frame.label
        self.error = frame.error
        if frame.error:
            return
        self.fresh_ns = frame.at_ns
        for event in frame.events:
            self._event(event)
        if frame.snapshot is not None:
            self._snapshot(frame.snapshot, frame.asked)

    # -- snapshots

    def _snapshot(self, given: Snapshot, asked: tuple[str, ...]) -> None:
        before = self.snapshot
        if before is not None and asked:
            unasked = set(Snapshot.__struct_fields__) - {"at_ns", "unix_seconds", "model", *asked}
            kept = {name: getattr(before, name) for name in unasked}
            given = msgspec.structs.replace(given, **kept)
            if given.kv is not None and before.kv is not None and len(asked) > 1:  # figures only: the map stays
                given = msgspec.structs.replace(
                    given, kv=msgspec.structs.replace(given.kv, block_map=before.kv.block_map)
                )
        self.snapshot = given
        if not asked:
            self._whole(given)
        if given.requests is not None:
            self._records(reversed(given.requests.finished))
        if not asked or "latency" in asked:
            self._point(given)

    def _whole(self, given: Snapshot) -> None:
        """A whole snapshot comes first and after each reconnection: what was missed meanwhile is in it."""
        newest = self.steps[-1].at_ns if self.steps else -1
        for report in given.steps or ():
            if report.at_ns > newest:
                self._step(report)
        known = {(type(note).__name__, note.at_ns) for note in self.notes}
        missed: list[Note] = [*(given.findings or ()), *(given.decisions or ()), *(given.incidents or ())]
        for note in sorted(missed, key=lambda note: note.at_ns):
            if (type(note).__name__, note.at_ns) not in known:
                self.notes.append(note)
        if not self.rungs:
            limit = given.memory.limit_bytes if given.memory else None
            self.rungs.extend(Rung(s.at_ns, {}, s.used_bytes, limit) for s in given.history or ())
        if given.limits is not None and (not self.limits or self.limits[-1][1] != given.limits):
            self.limits.append((given.at_ns, given.limits, "as found"))

    def _point(self, given: Snapshot) -> None:
        latency, queue, memory, kv = given.latency, given.queue, given.memory, given.kv
        for name in ("ttft", "inter_token", "e2e"):
            found: Percentiles | None = getattr(latency, name) if latency else None
            for point in ("p50", "p95", "p99"):
                self._add(f"{name}.{point}", getattr(found, point) if found else None)
        for name in ("output_tokens", "prefill_tokens", "requests", "steps"):
            self._add(name, getattr(latency, f"{name}_per_second") if latency else None)
        for name in ("running", "waiting"):
            self._add(name, getattr(queue, name) if queue else None)
        self._add("kv", kv_share(given))
        self._add("tail", kv.tail_ratio if kv else None)
        self._add("stranded", kv.stranded_ratio if kv else None)
        if memory is not None and memory.owners is not None:
            self.rungs.append(Rung(given.at_ns, memory.owners, memory.used_bytes, memory.limit_bytes))

    def _add(self, name: str, value: float | None) -> None:
        self.series.setdefault(name, Series()).add(value)

    def values(self, name: str) -> list[float | None]:
        """A live line, oldest first."""
        found = self.series.get(name)
        return list(found.values) if found else []

    # -- events

    def _event(self, event: Event) -> None:
        match event:
            case StepReport():
                self._step(event)
            case RequestRecord():
                self._records((event,))
            case events.LimitsChanged():
                self.limits.append((event.at_ns, event.limits, f"{event.source}: {event.why}"))
            case (
                events.Decision() | events.Incident() | events.Finding() | events.StateChanged() | events.EngineEnded()
            ):
                self.notes.append(event)
            case _:
                pass  # heartbeats and the like: their figures come with the next snapshot

    def _step(self, report: StepReport) -> None:
        self.steps.append(report)
        self.timelines.take(report)

    def _records(self, records: Iterable[RequestRecord]) -> None:
        for record in records:
            self.records[record.request_id] = record
            if len(self.records) > _RECORDS:
                self.records.popitem(last=False)
