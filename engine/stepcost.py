"""StepCost: what a step of some shape costs, learned while serving; and what follows from it for each step.

Owns the fit, how much others' prefill delays those who decode (`stall_ns`), and what bound a step. It must not know the
scheduler's reasons or the device; no torch, no clock. Enter at `StepMeter.step`; `StepCost` alone serves who simulates.

The model: fixed + prefill tokens + decoding rows + positions that decoding rows attend to + pairs of positions that
prefill attends to, each times a cost. Recursive least squares with exponential forgetting (Haykin, Adaptive Filter
Theory, ch. 10) on the relative error, so that short steps count as much as long ones; a step that took many times what
was expected (a page fault storm, a neighbour) counts as a few times that.
"""

from dataclasses import dataclass
from typing import Final

from engine.plan import StepPlan

# Units of the features, so that the fit's numbers are of one order.
_SCALE: Final = (1.0, 100.0, 10.0, 10_000.0, 100_000.0)
NAMES: Final = ("fixed_ns", "prefill_token_ns", "decode_row_ns", "context_token_ns", "prefill_pair_ns")
_FORGET = 0.998  # a step weighs half as much after 350 others
_UNSURE = 1e4  # variance of a cost nobody has seen, in units of (1 ms)²; forgetting never raises it beyond
_ENOUGH = 16  # steps before a figure is claimed
_OUTLIER = 4.0  # times what was expected, by a fit whose error is below:
_TRUSTED = 0.5
_ALIKE = 4  # of steps that only decode, which are all alike, one in so many is learned: learning costs 40 µs warm
_MS = 1e6


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step's cost depends on."""

    prefill_tokens: int = 0  # also those computed again
    decode_rows: int = 0
    context_tokens: int = 0  # positions that decoding rows attend to
    prefill_pairs: int = 0  # query and key positions of prefill attention

    @classmethod
    def of(cls, plan: StepPlan) -> "Shape":
        """O(1) for a step that only decodes."""
        why = plan.why
        if not why.prefill_rows:
            return cls(0, why.decode_rows, why.context_tokens, 0)
        tokens = ends = pairs = 0
        for piece in plan.slices:
            if piece.count > 1:
                end = piece.start + piece.count
                tokens += piece.count
                ends += end
                pairs += piece.count * (piece.start + end) // 2
        return cls(tokens, why.decode_rows, why.context_tokens - ends, pairs)

    @property
    def decode_only(self) -> "Shape":
        return Shape(0, self.decode_rows, self.context_tokens, 0)

    def features(self) -> list[float]:
        values = (1, self.prefill_tokens, self.decode_rows, self.context_tokens, self.prefill_pairs)
        return [value / scale for value, scale in zip(values, _SCALE, strict=True)]


class StepCost:
    """The fit. `error_ratio` is the moving average of |expected - taken| / taken, before each step was learned."""

    def __init__(self) -> None:
        self._costs = [0.0] * len(_SCALE)  # ms per unit of each feature
        self._spread = _unsure()
        self.steps = 0
        self.error_ratio = 0.0

    @property
    def known(self) -> bool:
        return self.steps >= _ENOUGH

    def expect_ns(self, shape: Shape) -> float:
        """What such a step would take; never negative."""
        return max(0.0, _dot(self._costs, shape.features())) * _MS

    @property
    def fixed_ns(self) -> float:
        """What any step takes; never negative."""
        return max(0.0, self._costs[0] / _SCALE[0]) * _MS

    def costs(self) -> dict[str, float]:
        """ns for each of NAMES: of any step, and per token, row, position and pair."""
        return {name: cost * _MS / scale for name, cost, scale in zip(NAMES, self._costs, _SCALE, strict=True)}

    def learn(self, shape: Shape, taken_ns: int) -> None:
        """A step of `shape` took so long."""
        taken = max(taken_ns, 1) / _MS
        features = shape.features()
        expected = max(0.0, _dot(self._costs, features))
        error = abs(expected - taken) / taken
        if self.steps:
            self.error_ratio += (error - self.error_ratio) / min(self.steps, 50)
        if self.known and self.error_ratio < _TRUSTED and expected > 0.0:  # a fit that expects nothing caps nothing
            taken = min(taken, _OUTLIER * expected)
        self.steps += 1
        scale = max(taken, expected)
        self._update([value / scale for value in features], taken / scale)

    def _update(self, x: list[float], y: float) -> None:
        """One step of recursive least squares towards x · costs = y."""
        spread = self._spread
        px = [_dot(row, x) for row in spread]
        gain_over = _FORGET + _dot(px, x)
        if not gain_over > 0.0:  # rounding has spoilt the spread, which must be positive definite: begin it again
            self._spread = _unsure()
            return
        missing = y - _dot(self._costs, x)
        push = missing / gain_over
        self._costs = [cost + value * push for cost, value in zip(self._costs, px, strict=True)]
        widest = max(spread[0][0], spread[1][1], spread[2][2], spread[3][3], spread[4][4])
        keep = 1.0 / _FORGET if widest < _UNSURE else 1.0
        scaled = [value / gain_over for value in px]
        self._spread = [
            [(old - left * right) * keep for old, right in zip(row, scaled, strict=True)]
            for row, left in zip(spread, px, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What memory can do at best: `bytes_per_ns` measured at start (0 = not), over what every step reads
    (`weights_bytes`) and each position of context (`context_token_bytes`)."""

    bytes_per_ns: float = 0.0
    weights_bytes: int = 0
    context_token_bytes: int = 0


class StepMeter:
    """Learns every step. `stall_ns` is the sum over all steps of what mixed ones took beyond what a decode-only step
    of the same decoding rows would have taken; a row's own stall is the difference of two readings."""

    def __init__(self, ceilings: Ceilings | None = None) -> None:
        self.cost = StepCost()
        self.stall_ns = 0
        self._ceilings = ceilings or Ceilings()
        self._decode_steps = 0  # that only decoded: without any, their cost would be a guess

    def step(self, plan: StepPlan, step_ns: int, forward_ns: int) -> str:
        """Take one step's time, and its part on the device. Returns what bound it (telemetry.events.STEP_BOUNDS);
        empty while that is not known."""
        shape = Shape.of(plan)
        known = self.cost.known
        learns = True
        if shape.prefill_tokens and shape.decode_rows:
            if known and self._decode_steps:
                self.stall_ns += max(0, step_ns - int(self.cost.expect_ns(shape.decode_only)))
        elif shape.decode_rows:
            self._decode_steps += 1
            learns = not known or self._decode_steps % _ALIKE == 0
        bound = self._bound(shape, plan.why.context_tokens, step_ns, forward_ns) if known and forward_ns else ""
        if learns:
            try:
                self.cost.learn(shape, step_ns)
            except ArithmeticError:  # an instrument may lose what it knew, never the step it measured
                self.cost = StepCost()
        return bound

    def _bound(self, shape: Shape, context_tokens: int, step_ns: int, forward_ns: int) -> str:
        """The largest of: what memory needs at its measured best; what the fit says tokens cost beyond that; the host's
        own time and the fixed cost that reading the weights does not explain."""
        ceilings = self._ceilings
        if not ceilings.bytes_per_ns:
            return ""
        weights_ns = ceilings.weights_bytes / ceilings.bytes_per_ns
        context_ns = context_tokens * ceilings.context_token_bytes / ceilings.bytes_per_ns
        fixed_ns = self.cost.fixed_ns
        host_ns = step_ns - forward_ns
        spent = {
            "bandwidth": weights_ns + context_ns,
            "compute": max(0.0, self.cost.expect_ns(shape) - fixed_ns - context_ns),
            "overhead": host_ns + max(0.0, fixed_ns - host_ns - weights_ns),
        }
        return max(spent, key=lambda name: spent[name])


def _unsure() -> list[list[float]]:
    size = range(len(_SCALE))
    return [[_UNSURE if i == j else 0.0 for j in size] for i in size]


def _dot(a: list[float], b: list[float]) -> float:
    return sum([x * y for x, y in zip(a, b, strict=True)])
