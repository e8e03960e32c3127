"""Rows about the live limits and the decisions that move them."""

import msgspec

from telemetry.events import LimitsView
from telemetry.metric import OPEN, Metric, Reading, View, each

_KNOBS = LimitsView.__struct_fields__


def _limits(view: View) -> list[Reading]:
    limits = view.state.limits
    return each(msgspec.structs.asdict(limits)) if limits else []


ROWS = (
    Metric("inferd_tuner_limit", "gauge", "The live limits.", _limits, {"knob": _KNOBS}),
    Metric(
        "inferd_tuner_decisions",
        "counter",
        "Changes of a limit, by the rule that made them.",
        lambda view: list(view.state.decision_counts.items()),
        {"rule": OPEN, "knob": _KNOBS, "direction": ("up", "down", "rollback")},
    ),
)
