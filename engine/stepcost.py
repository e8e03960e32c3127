"""StepCost: what a step of some shape costs, learned while serving; and what follows from it for each step.

Owns the one model and its fit, how much others' prefill delays those who decode (`stall_ns`), and what bound a step. It
must not know the scheduler's reasons or the device; no torch, no clock. Enter at `StepMeter.step`; the tuner learns by
a `CostFit` of its own, and the simulator lives by a `StepCost`.

The model: fixed + prefill tokens + decoding rows + positions that decoding rows attend to + pairs of positions that
prefill attends to + decoding rows squared, each times a cost. The last makes a knee: beyond √(fixed ÷ crowd) rows more
of them lower the throughput. Recursive least squares with exponential forgetting (Haykin, Adaptive Filter Theory, ch.
10). Each step is divided by what was expected of it, so that short steps count as much as long ones; not by what it
took, which would favour the fast ones among equals: a fit that is right about the mean is what a forecast needs. A step
that took many times what was expected (a page fault storm, a neighbour) counts as twice that.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from engine.plan import StepPlan

# Units of the features, so that the fit's numbers are of one order. What has the larger one is believed in later: while
# the number of rows is the same in every step, a row's cost could as well be one of its square, and a knee would be
# seen where there is none.
_SCALE: Final = (1.0, 100.0, 10.0, 10_000.0, 100_000.0, 10_000.0)
NAMES: Final = (
    "fixed_ns",
    "prefill_token_ns",
    "decode_row_ns",
    "context_token_ns",
    "prefill_pair_ns",
    "row_squared_ns",
)
_MEMORY = 500.0  # after so many steps one weighs a third
_UNSURE = 1e4  # variance of a cost nobody has seen, in squared first steps; forgetting raises none beyond, but for a
_SLACK = 1.1  # tenth: so the bound is enforced once in dozens of steps
_ENOUGH = 16  # steps before a figure is claimed
_OUTLIER = 2.0  # times what was expected, by a fit whose error is below:
_TRUSTED = 0.5
_ALIKE = 4  # of steps that only decode, which are all alike, one in so many is learned: learning costs 40 µs warm
# Prefill tokens and decoding rows of the steps that stand for what was learned before.
_MANY: Final = ((0, 1), (0, 4), (0, 16), (0, 32), (0, 64), (16, 2), (64, 0), (64, 8), (256, 0), (512, 0))


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's cost depends on; of several steps alike, the mean."""

    prefill_tokens: float = 0  # also those computed again
    decode_rows: float = 0
    context_tokens: float = 0  # positions that decoding rows attend to
    prefill_pairs: float = 0  # query and key positions of prefill attention

    @classmethod
    def of(cls, plan: StepPlan) -> "StepShape":
        """O(1) for a step that only decodes."""
        why = plan.why
        if not why.prefill_rows:
            return cls(0, why.decode_rows, why.context_tokens, 0)
        pieces = [(piece.start, piece.count) for piece in plan.slices]
        return cls.counted(why.decode_rows, why.context_tokens, pieces)

    @classmethod
    def counted(
        cls, decode_rows: int, context_tokens: int, pieces: Iterable[tuple[int, int]], steps: int = 1
    ) -> "StepShape":
        """Of what was granted in so many steps: sums over their rows, and each piece's (start, count)."""
        tokens = ends = pairs = 0
        for start, count in pieces:
            if count > 1:
                tokens += count
                ends += start + count
                pairs += count * (2 * start + count) // 2
        if steps == 1:
            return cls(tokens, decode_rows, context_tokens - ends, pairs)
        return cls(tokens / steps, decode_rows / steps, (context_tokens - ends) / steps, pairs / steps)

    @property
    def decode_only(self) -> "StepShape":
        return StepShape(0, self.decode_rows, self.context_tokens, 0)

    def features(self) -> list[float]:
        rows = self.decode_rows
        values = (1, self.prefill_tokens, rows, self.context_tokens, self.prefill_pairs, rows * rows)
        return [value / scale for value, scale in zip(values, _SCALE, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What is known of the costs, in seconds; none is negative."""

    fixed_s: float
    prefill_s: float  # per prefill token
    row_s: float  # per decoding row
    context_s: float  # per position that a decoding row attends to
    pair_s: float = 0.0  # per pair of positions of prefill attention
    crowd_s: float = 0.0  # per decoding row squared

    def seconds(self, shape: StepShape) -> float:
        """What such a step takes."""
        rows = shape.decode_rows
        return (
            self.fixed_s
            + self.prefill_s * shape.prefill_tokens
            + self.row_s * rows
            + self.context_s * shape.context_tokens
            + self.pair_s * shape.prefill_pairs
            + self.crowd_s * rows * rows
        )


class CostFit:
    """The fit; after `memory` steps one weighs a third. `error_ratio` is the moving average of
    |expected - taken| / taken, before each step was learned."""

    def __init__(self, memory: float = _MEMORY) -> None:
        self._forget = 1 - 1 / memory
        self._unit_ns = 1.0  # the first step: a machine's speed is not known beforehand
        self._costs = [0.0] * len(_SCALE)  # in that, per unit of each feature
        self._spread = _unsure()
        self.steps = 0
        self.error_ratio = 0.0

    @property
    def known(self) -> bool:
        return self.steps >= _ENOUGH

    def expect_ns(self, shape: StepShape) -> float:
        """What such a step would take; never negative."""
        return max(0.0, _dot(self._costs, shape.features())) * self._unit_ns

    @property
    def fixed_ns(self) -> float:
        """What any step takes; never negative."""
        return max(0.0, self._costs[0] / _SCALE[0]) * self._unit_ns

    def costs(self) -> dict[str, float]:
        """ns for each of NAMES: of any step, and per token, row, position, pair and row squared."""
        return {
            name: self._unit_ns * cost / scale for name, cost, scale in zip(NAMES, self._costs, _SCALE, strict=True)
        }

    def cost(self) -> StepCost | None:
        """What can be reckoned with beyond the steps that were seen; None before there were enough. A cost that the fit
        has below nothing is taken to be nothing, and the others become what the fit would have made of them, knowing
        that (a Gaussian's conditional mean)."""
        if not self.known:
            return None
        costs, spread = list(self._costs), [list(row) for row in self._spread]
        while min(costs) < 0.0:
            worst = min(range(len(costs)), key=costs.__getitem__)
            column, variance, excess = [row[worst] for row in spread], spread[worst][worst], costs[worst]
            if variance > 0.0:
                costs = [cost - share * excess / variance for cost, share in zip(costs, column, strict=True)]
                spread = [
                    [old - left * right / variance for old, right in zip(row, column, strict=True)]
                    for row, left in zip(spread, column, strict=True)
                ]
            costs[worst] = 0.0
            spread = [[0.0 if worst in (i, j) else v for j, v in enumerate(row)] for i, row in enumerate(spread)]
        fixed, prefill, row, context, pair, crowd = (
            self._unit_ns * cost / scale / 1e9 for cost, scale in zip(costs, _SCALE, strict=True)
        )
        return StepCost(
            fixed_s=fixed, prefill_s=prefill, row_s=row, context_s=context, pair_s=pair, crowd_s=crowd
        )  # fmt: skip

    def begin_with(self, cost: StepCost) -> None:
        """Start from what an earlier life learned, as if steps of many shapes had been seen: a few dozen, so that
        a machine that has changed is soon known better."""
        for prefill, rows in _MANY * 2:
            for context in (64, 512):
                shape = StepShape(prefill, rows, rows * context, prefill * context)
                self.learn(shape, cost.seconds(shape) * 1e9)
        self.error_ratio = 0.0

    def learn(self, shape: StepShape, taken_ns: float) -> None:
        """A step of `shape` took so long."""
        if not self.steps:
            self._unit_ns = max(taken_ns, 1.0)
        taken = max(taken_ns, 1.0) / self._unit_ns
        features = shape.features()
        expected = max(0.0, _dot(self._costs, features))
        error = abs(expected - taken) / taken
        if self.steps:
            self.error_ratio += (error - self.error_ratio) / min(self.steps, 50)
        if self.known and self.error_ratio < _TRUSTED and expected > 0.0:  # a fit that expects nothing caps nothing
            taken = min(taken, _OUTLIER * expected)
            scale = expected
        else:
            scale = max(taken, expected)
        self.steps += 1
        self._update([value / scale for value in features], taken / scale)

    def _update(self, x: list[float], y: float) -> None:
        """One step of recursive least squares towards x · costs = y."""
        spread = self._spread
        px = [_dot(row, x) for row in spread]
        gain_over = self._forget + _dot(px, x)
        if not gain_over > 0.0:  # rounding has spoilt the spread, which must be positive definite: begin it again
            self._spread = _unsure()
            return
        missing = y - _dot(self._costs, x)
        push = missing / gain_over
        self._costs = [cost + value * push for cost, value in zip(self._costs, px, strict=True)]
        scaled = [value / gain_over for value in px]
        self._spread = spread = [
            [(old - left * right) / self._forget for old, right in zip(row, scaled, strict=True)]
            for row, left in zip(spread, px, strict=True)
        ]
        variances = [row[i] for i, row in enumerate(spread)]
        widest = max(variances)
        if widest > _SLACK * _UNSURE:  # as if this cost had been seen once more, to be what it is taken for
            column = spread[variances.index(widest)]
            less = (widest - _UNSURE) / widest**2
            self._spread = [
                [old - left * right * less for old, right in zip(row, column, strict=True)]
                for row, left in zip(spread, column, strict=True)
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
        self.cost = CostFit()
        self.stall_ns = 0
        self._ceilings = ceilings or Ceilings()
        self._decode_steps = 0  # that only decoded: without any, their cost would be a guess

    def step(self, plan: StepPlan, step_ns: int, forward_ns: int) -> str:
        """Take one step's time, and its part on the device. Returns what bound it (telemetry.events.STEP_BOUNDS);
        empty while that is not known."""
        shape = StepShape.of(plan)
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
                self.cost = CostFit()
        return bound

    def _bound(self, shape: StepShape, context_tokens: int, step_ns: int, forward_ns: int) -> str:
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
