"""What a step should have taken: the daemon's own fit of step cost, applied to a step report.

Owns how a report's columns become the fit's features (as engine/stepcost.py takes them of a plan). Pure; it must not
know how it is drawn. Enter at `Model.of`.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from telemetry.events import STEP_PHASES, StepReport

_FEATURES: Final = (
    "fixed_ns",
    "prefill_token_ns",
    "decode_row_ns",
    "context_token_ns",
    "prefill_pair_ns",
    "row_squared_ns",  # which older daemons do not know
)
_PUBLISHED: Final = "publish"  # the fit is of a step up to its commit
_TRUSTED: Final = 0.5  # error of the fit from which on it is no measure of any step


@dataclass(frozen=True, slots=True)
class Model:
    """The fit as a snapshot has it: ns of any step, per prompt token, decoding row, position that decoding rows attend
    to, pair of positions of prefill, and decoding row squared; and its mean error, as a share of what steps took."""

    costs: tuple[float, ...]
    error_ratio: float

    @classmethod
    def of(cls, step_cost: Mapping[str, float] | None) -> "Model | None":
        """None while the daemon has no fit, or one of another version."""
        if not step_cost or any(name not in step_cost for name in _FEATURES[:-1]):
            return None
        return cls(tuple(step_cost.get(name, 0.0) for name in _FEATURES), step_cost.get("error_ratio", 0.0))

    @property
    def trusted(self) -> bool:
        """Good enough to call a step late."""
        return self.error_ratio < _TRUSTED

    @property
    def prompt_token_ns(self) -> float:
        return self.costs[_FEATURES.index("prefill_token_ns")]

    def expected_ns(self, report: StepReport) -> float:
        """Of one step of the report: of a merged one, the mean. Never negative."""
        features = _features(report)
        return max(0.0, sum(a * b for a, b in zip(self.costs, features, strict=True))) / max(1, report.merged)

    def times(self, report: StepReport) -> float | None:
        """How many times the expected time it took; None where the fit expects nothing."""
        expected = self.expected_ns(report)
        return taken_ns(report) / expected if expected > 0 else None


def taken_ns(report: StepReport) -> float:
    """What the fit is of: host time of one step up to its commit; of a merged report, the mean."""
    spent: int = sum(getattr(report, f"{phase}_ns") for phase in STEP_PHASES if phase != _PUBLISHED)
    return spent / max(1, report.merged)


def _features(report: StepReport) -> tuple[float, ...]:
    """Summed over the steps of the report. A grant of more than one position is a prompt's, if there are prompts."""
    steps = max(1, report.merged)
    squared = report.decode_rows * report.decode_rows / steps  # as if each step had as many
    if not report.prefill_rows:
        return steps, 0, report.decode_rows, report.context_tokens, 0, squared
    tokens = ends = pairs = 0
    for _, start, count in struct.iter_unpack("<iii", report.rows[: len(report.rows) // 12 * 12]):
        if count > 1:
            end = start + count
            tokens += count
            ends += end
            pairs += count * (start + end) // 2
    return steps, tokens, report.decode_rows, report.context_tokens - ends, pairs, squared
