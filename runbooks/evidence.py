"""Evidence: everything that is known of a daemon at one instant, as one frozen value that may lack any part.

Owns the value and the few views of it that several checks share. It must not know how it is gathered (gather.py) nor
what follows from it (the checks). Enter at `Evidence`; a part that is None is 'not reported'.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import msgspec

from telemetry import events
from telemetry.parts import Sample
from telemetry.probe import Cgroup, HostMemory
from telemetry.snapshot import Snapshot

E = TypeVar("E", bound=events.Event)

LOOK_BACK_SECONDS: Final = 1800.0
WINDOW_SECONDS: Final = 60.0  # what 'now' means to a check: as long as the snapshot's own window
NEVER_SERVED: Final = ("shed", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What is too much. The defaults are those of the alerts."""

    ttft_seconds: float = 5.0  # p99
    inter_token_seconds: float = 0.5  # p99
    loop_lag_seconds: float = 0.25  # p90
    stuck_seconds: float = 10.0  # without progress; a slow prefill makes progress
    start_seconds: float = 120.0
    creep_bytes: int = 128 << 20
    disk_free_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine as seen from the doctor's process. `engine_state` is the letter of /proc/PID/stat."""

    cores: int | None = None
    load_1m: float | None = None
    memory: HostMemory | None = None
    cgroup: Cgroup | None = None
    state_dir: str | None = None
    disk_free_bytes: int | None = None
    disk_total_bytes: int | None = None
    engine_state: str | None = None
    engine_threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The last life of a daemon as its flight recorder tells it. `clean` is the mark of an orderly end."""

    pid: int
    alive: bool
    clean: bool
    silent_seconds: float  # since its last event


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One thing about the installation that will hurt, and what to do about it."""

    what: str
    found: str
    do: str
    severity: str = "warning"


@dataclass(frozen=True, slots=True)
class Dated:
    """An event and how long ago it was, also if that was in another life of the daemon or of the machine."""

    age_seconds: float
    event: events.Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """`source` says where it is from: daemon (its own rounds) | live (asked over a socket) | offline (files alone).
    `missing` says of what could not be had, why."""

    source: str
    at_ns: int
    unix_seconds: float
    snapshot: Snapshot
    past: tuple[Dated, ...] = ()  # oldest first, at most LOOK_BACK_SECONDS
    host: Host = field(default_factory=Host)
    life: Life | None = None
    installation: tuple[Trouble, ...] | None = None
    settings: Mapping[str, Any] | None = None  # name → {value, source}
    targets: Targets = field(default_factory=Targets)
    missing: Mapping[str, str] = field(default_factory=dict)
    gather_seconds: float = 0.0

    def of(self, kind: type[E], within_seconds: float = LOOK_BACK_SECONDS) -> list[E]:
        """Events of one kind, oldest first."""
        return [d.event for d in self.past if d.age_seconds <= within_seconds and isinstance(d.event, kind)]

    @property
    def steps(self) -> list[events.StepReport]:
        """Step reports of the last minute, oldest first."""
        since_ns = self.at_ns - int(WINDOW_SECONDS * 1e9)
        return [step for step in self.snapshot.steps or [] if step.at_ns >= since_ns]

    def served(self, within_seconds: float = LOOK_BACK_SECONDS) -> list[events.RequestRecord]:
        """Records of choices that were taken on, oldest first."""
        return [each for each in self.of(events.RequestRecord, within_seconds) if each.reason not in NEVER_SERVED]

    @property
    def history(self) -> list[Sample]:
        return self.snapshot.history or []

    def incidents(self, *kinds: str, within_seconds: float = LOOK_BACK_SECONDS) -> list[events.Incident]:
        """Of these kinds, each once, oldest first."""
        found = {each.incident_id: each for each in self.of(events.Incident, within_seconds) if each.kind in kinds}
        return list(found.values())

    @property
    def serving(self) -> bool:
        """The engine is there and ready, as far as is known."""
        return self.snapshot.state is not None and self.snapshot.state.engine == "ready"

    def setting(self, name: str, default: float) -> float:
        """A number among the settings of the daemon."""
        entry = (self.settings or {}).get(name)
        value = entry.get("value") if isinstance(entry, Mapping) else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    def within(self, seconds: float) -> "Evidence":
        """The same with nothing that happened longer ago, e.g. since a remedy. Windows that the daemon itself folded
        (latencies, the time breakdown) stay as long as they are; as long as the history has no newer sample, one older
        stays, to compare."""
        since_ns = self.at_ns - int(seconds * 1e9)
        newer = [sample for sample in self.history if sample.at_ns >= since_ns]
        shot = msgspec.structs.replace(
            self.snapshot,
            steps=None if self.snapshot.steps is None else [s for s in self.snapshot.steps if s.at_ns >= since_ns],
            history=None if self.snapshot.history is None else newer or self.history[-1:],
        )
        past = tuple(dated for dated in self.past if dated.age_seconds <= seconds)
        return replace(self, snapshot=shot, past=past)

    def without(self, *parts: str) -> "Evidence":
        """The same with these parts of the snapshot 'not reported'."""
        return replace(self, snapshot=_without(self.snapshot, parts))


def _without(snapshot: Snapshot, parts: tuple[str, ...]) -> Snapshot:
    kept = {name: getattr(snapshot, name) for name in snapshot.__struct_fields__ if name not in parts}
    return Snapshot(**kept)


def step_seconds(step: events.StepReport) -> float:
    """Of one step; of a merged report their mean."""
    total = step.plan_ns + step.launch_ns + step.collect_ns + step.commit_ns + step.publish_ns
    return total / max(1, step.merged) / 1e9


def lost(evidence: Evidence) -> dict[str, int]:
    """Events that a sink lost within the half hour of the history, by sink; since the start where there is none."""
    totals = evidence.snapshot.totals
    now = (totals.telemetry_dropped if totals else None) or {}
    before = evidence.history[0].dropped if evidence.history else {}
    return {sink: max(0, count - before.get(sink, 0)) for sink, count in now.items()}
