"""Rows about the live limits and the decisions that move them."""

import msgspec

from telemetry.events import TARGETS, LimitsView
from telemetry.metric import OPEN, Metric, Reading, View, each

_KNOBS = LimitsView.__struct_fields__


def _limits(view: View) -> list[Reading]:
    limits = view.state.limits
    return each(msgspec.structs.asdict(limits)) if limits else []


def _missed(view: View) -> list[Reading]:
    """Nothing before there are limits: without an engine nobody knows."""
    missed = view.state.missed_targets or {}
    return each({name.removesuffix("_s"): int(name in missed) for name in TARGETS}) if view.state.limits else []


ROWS = (
    Metric("inferd_tuner_limit", "gauge", "The live limits.", _limits, {"knob": _KNOBS}),
    Metric(
        "inferd_tuner_decisions",
        "counter",
        "Changes of a limit, by the rule that made them.",
        lambda view: list(view.state.decision_counts.items()),
        {"rule": OPEN, "knob": _KNOBS, "direction": ("up", "down", "rollback")},
    ),
    Metric(
        "inferd_target_missed",
        "gauge",
        "1 while a target of latency is missed and has been for a while; 0 also where none was set.",
        _missed,
        {"target": tuple(name.removesuffix("_s") for name in TARGETS)},
    ),
)
