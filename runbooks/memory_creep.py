"""Memory that nobody booked grows and does not come back."""

import itertools
from collections.abc import Callable

from runbooks.check import finding
from runbooks.evidence import Evidence
from telemetry.events import Finding
from telemetry.parts import Sample

_LEAST_SAMPLES = 12
_PARTS = 4  # of the history: the floor of each must be above that of the one before


def check(evidence: Evidence) -> Finding | None:
    ran_out = [each for each in evidence.incidents("oom") if each.cause == "leak"]
    incidents = ran_out or evidence.incidents("leak_suspected")
    grown = _creeping(evidence)
    if grown is None and not incidents:
        return None
    what, floors = grown or ("unbooked memory", [])
    section = "buy-time" if ran_out else "which-process"
    return finding(
        evidence,
        "memory_creep",
        "warning",
        f"{what} grows without a reason: {_mib(floors[-1] - floors[0])} so far"
        if floors
        else f"a leak {'took all memory' if ran_out else 'is suspected'}: {incidents[-1].summary}",
        confidence=0.8 if incidents else 0.7,
        next_step=f"inferd doctor runbook memory_creep {section}",
        section=section,
        explains=("oom",),
        floor=" → ".join(map(_mib, floors)) or "not reported",
        over=f"{(evidence.history[-1].at_ns - evidence.history[0].at_ns) / 6e10:.0f} minutes"
        if evidence.history
        else "not reported",
        load=_load(evidence.history),
    )


def _creeping(evidence: Evidence) -> tuple[str, list[int]] | None:
    """What grew from each part of the history to the next, by its floors, peaks left out."""
    figures: tuple[tuple[str, Callable[[Sample], int | None]], ...] = (
        ("the engine's unbooked memory", lambda sample: sample.unbooked_bytes),
        ("the daemon's resident memory", lambda sample: sample.daemon_resident_bytes),
    )
    for what, figure in figures:
        values = [value for value in map(figure, evidence.history) if value is not None]
        if len(values) < _LEAST_SAMPLES:
            continue
        size = len(values) // _PARTS
        floors = [min(values[len(values) - size * part :][:size]) for part in range(_PARTS, 0, -1)]
        rises = all(after > before for before, after in itertools.pairwise(floors))
        if rises and floors[-1] - floors[0] >= evidence.targets.creep_bytes:
            return what, floors
    return None


def _load(history: list[Sample]) -> str:
    running = [sample.running for sample in history if sample.running is not None]
    return f"{running[0]} running at first, {running[-1]} now" if running else "not reported"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
