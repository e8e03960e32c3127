"""Rows about the daemon's life: the state it is in, and what the engine's last start spent its time on."""

from telemetry.metric import OPEN, Metric, Reading, View, each

STATES = ("starting", "ready", "degraded", "draining", "stopped")


def _state(view: View) -> list[Reading]:
    known = view.state.lifecycle
    return each({name: int(name == known.state) for name in STATES}) if known else []


def _start(view: View) -> list[Reading]:
    """`other` is what the total has beyond the named phases, so that the series sum to it."""
    started = view.state.started
    if started is None:
        return []
    phases = dict(started.phases)
    total_ns = phases.pop("total", 0)
    phases["other"] = max(0, total_ns - sum(phases.values()))
    return each({phase: length_ns / 1e9 for phase, length_ns in phases.items()})


ROWS = (
    Metric(
        "inferd_state", "gauge", "1 for the state that the daemon is in, 0 for the others.", _state, {"state": STATES}
    ),
    Metric(
        "inferd_engine_start_seconds",
        "gauge",
        "What the engine's last start took, by phase; the phases sum to it.",
        _start,
        {"phase": OPEN},
    ),
)
