"""What a step costs, learned from the steps that ran; and what that means for a number of rows. Pure but for its sums.

step seconds ≈ fixed + prefill · P + row · D + context · C + crowd · D², with P prefill tokens, D decoding rows and C
positions attended to; no coefficient is negative. The last term is what makes a knee: beyond √(fixed ÷ crowd) rows
more of them lower the throughput. It must not know limits, rules or where steps come from. Enter at `CostFit.learn`,
`CostFit.cost` and `forecast`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_TERMS = 5
_SCALE = (1.0, 1e2, 1e1, 1e4, 1e3)  # so that the sums of squares are of one size
_LEAST_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Coefficients in seconds."""

    fixed_s: float
    prefill_s: float  # per prefill token
    row_s: float  # per decoding row
    context_s: float  # per position of context
    crowd_s: float = 0.0  # per decoding row squared

    def seconds(self, prefill_tokens: float, rows: float, context_tokens: float) -> float:
        return (
            self.fixed_s
            + self.prefill_s * prefill_tokens
            + self.row_s * rows
            + self.context_s * context_tokens
            + self.crowd_s * rows * rows
        )


@dataclass(slots=True)
class CostFit:
    """Least squares over the steps seen, the older ones weighing less; `memory` is after how many steps one weighs a
    third. Each step is divided by its own length, so that the relative error is what becomes small."""

    memory: float = 2000.0
    steps: float = 0.0
    error: float = 0.0  # mean relative error of what was predicted for each step before it was learned
    _xx: list[list[float]] = field(default_factory=lambda: [[0.0] * _TERMS for _ in range(_TERMS)])
    _xy: list[float] = field(default_factory=lambda: [0.0] * _TERMS)
    _solved: StepCost | None = None
    _stale: bool = True

    def learn(self, prefill_tokens: float, rows: float, context_tokens: float, seconds: float) -> None:
        """One step, or the mean of several alike."""
        if seconds <= 0:
            return
        if self._solved is not None:
            miss = abs(self._solved.seconds(prefill_tokens, rows, context_tokens) - seconds) / seconds
            self.error += 0.02 * (min(miss, 2.0) - self.error)
        values = (1.0, prefill_tokens, rows, context_tokens, rows * rows)
        x = [value / scale / seconds for value, scale in zip(values, _SCALE, strict=True)]
        keep = 1 - 1 / self.memory
        for i in range(_TERMS):
            row = self._xx[i]
            for j in range(_TERMS):
                row[j] = row[j] * keep + x[i] * x[j]
            self._xy[i] = self._xy[i] * keep + x[i]
        self.steps = self.steps * keep + 1
        self._stale = True

    def cost(self) -> StepCost | None:
        """What is known now; None before there were enough steps."""
        if self._stale and self.steps >= _LEAST_STEPS:
            found = nonnegative(self._xx, self._xy)
            fixed, prefill, row, context, crowd = (value / scale for value, scale in zip(found, _SCALE, strict=True))
            self._solved = StepCost(fixed_s=fixed, prefill_s=prefill, row_s=row, context_s=context, crowd_s=crowd)
            self._stale = False
        return self._solved

    def begin_with(self, cost: StepCost) -> None:
        """Start from what an earlier life learned, as if steps of many shapes had been seen: a few dozen, so that
        a machine that has changed is soon known better."""
        for _ in range(2):
            for prefill, rows in (
                (0, 1),
                (0, 4),
                (0, 16),
                (0, 32),
                (0, 64),
                (16, 2),
                (64, 0),
                (64, 8),
                (256, 0),
                (512, 0),
            ):
                for context in (rows * 64 + prefill, rows * 512 + prefill):
                    self.learn(prefill, rows, context, cost.seconds(prefill, rows, context))
        self.error = 0.0


def nonnegative(xx: Sequence[Sequence[float]], xy: Sequence[float]) -> list[float]:
    """argmin ‖Xb − y‖ with b ≥ 0, from XᵀX and Xᵀy, by cyclic coordinate descent (Franc et al., 2005), with a ridge so
    small that only a term that was never seen to vary is decided by it."""
    count = len(xy)
    ridge = [1e-6 * xx[i][i] + 1e-15 for i in range(count)]
    b = [0.0] * count
    for _ in range(400):
        moved = 0.0
        for i in range(count):
            rest = xy[i] - sum(xx[i][j] * b[j] for j in range(count) if j != i)
            new = max(0.0, rest / (xx[i][i] + ridge[i])) if xx[i][i] else 0.0
            moved = max(moved, abs(new - b[i]) / (abs(new) + 1e-12))
            b[i] = new
        if moved < 1e-6:
            break
    return b


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A steady state that the model expects."""

    tokens_per_s: float
    requests_per_s: float
    inter_token_s: float  # a decode-only step
    mixed_step_s: float  # a step that also computes a chunk of a prompt
    mixed_share: float  # of the steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What requests are like, on average: tokens to compute of a prompt, tokens of an answer, positions of context."""

    prompt_tokens: float
    output_tokens: float
    context_tokens: float


def forecast(cost: StepCost, demand: Demand, rows: float, chunk: float) -> Forecast:
    """`rows` sequences at any moment, each replaced when it ends: in a step, rows ÷ output sequences end and bring
    their prompts in chunks."""
    rows, chunk = max(1.0, rows), max(1.0, chunk)
    prefill = rows * demand.prompt_tokens / max(1.0, demand.output_tokens)  # tokens a step
    context = rows * demand.context_tokens
    decode_s = cost.seconds(0, rows, context)
    share = min(1.0, prefill / chunk)
    # More prompt than chunks can carry: rows wait for their prompts, and fewer of them decode.
    busy = min(1.0, chunk / prefill) if prefill > chunk else 1.0
    step_s = decode_s + cost.prefill_s * min(prefill, chunk)
    tokens = rows * busy / step_s if step_s > 0 else math.inf
    return Forecast(
        tokens_per_s=tokens,
        requests_per_s=tokens / max(1.0, demand.output_tokens),
        inter_token_s=decode_s,
        mixed_step_s=decode_s + cost.prefill_s * chunk,
        mixed_share=share,
    )
