"""Rows about speculative decoding; registered, without series until the engine speculates."""

from telemetry import buckets
from telemetry.metric import Metric, unowned

ROWS = (
    Metric(
        "inferd_spec_tokens",
        "counter",
        "Draft tokens: proposed and accepted.",
        unowned,
        {"outcome": ("drafted", "accepted")},
    ),
    Metric(
        "inferd_spec_accepted_length",
        "histogram",
        "Draft tokens accepted per verification.",
        unowned,
        buckets=buckets.SPEC_LENGTH,
    ),
)
