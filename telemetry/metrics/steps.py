"""Rows about engine steps: where their time went and what they computed."""

from telemetry import buckets
from telemetry.events import STEP_BOUNDS, STEP_PHASES
from telemetry.metric import Metric, each, one, unowned

ROWS = (
    Metric(
        "inferd_step_seconds",
        "histogram",
        "Host time of an engine step by phase; the phases sum to the step.",
        lambda view: each(view.state.phases),
        {"phase": STEP_PHASES},
        buckets.STEP,
    ),
    Metric(
        "inferd_step_device_seconds",
        "histogram",
        "Device time of an engine step by phase.",
        lambda view: each(view.state.device_phases),
        {"phase": ("forward", "sample")},
        buckets.STEP,
    ),
    Metric(
        "inferd_step_tokens",
        "counter",
        "Positions granted; those computed again after a preemption are apart.",
        lambda view: each(view.state.step_tokens),
        {"kind": ("prefill", "decode", "draft", "recompute")},
    ),
    Metric(
        "inferd_step_bound",
        "counter",
        "Steps by what limited them, as far as that is known.",
        lambda view: each(view.state.bound) if any(view.state.bound.values()) else [],
        {"by": STEP_BOUNDS},
    ),
    Metric(
        "inferd_step_cost_error_ratio",
        "gauge",
        "Relative error of the fitted model of step time, a moving average.",
        lambda view: one(view.state.status.step_cost.get("error_ratio") if view.state.status else None),
    ),
    Metric(
        "inferd_moe_expert_tokens",
        "counter",
        "Tokens routed to each expert.",
        unowned,
        {"expert": None},
    ),
)
