"""What the tuner learns from windows: the cost of a step, what requests are like, and what each holds of the pool.

Owns these estimates. It must not know rules. Enter at `Learning.take`.
"""

from collections import deque
from dataclasses import asdict, replace

from autotune.costmodel import Demand
from autotune.memory import Learned
from autotune.space import Space
from autotune.window import Shape, Window
from engine.stepcost import CostFit

QUANTILE = 0.9  # of the lengths of answers: what a newcomer is charged
_ROOM = 0.92  # of the watermark that admission may plan with: requests are not all of the mean
_FORGET = 0.995  # a window
_MEMORY = 2000.0  # samples of steps, of which a window has some dozens
_STILL = 0.01  # of the memory limit: by less, what is measured does not move the lines


class Learning:
    """`learned` is what an earlier life left behind."""

    def __init__(self, learned: Learned | None = None) -> None:
        self.fit = CostFit(_MEMORY)
        self.ended = 0  # requests, since the begin
        self._shapes: deque[Shape] = deque(maxlen=512)
        self._footprint = learned.footprint if learned else 0.0  # blocks a running sequence holds, at the busiest
        self._fixed: deque[int] = deque(maxlen=12)  # bytes in use beside the active blocks, as measured
        if learned and learned.fixed_bytes:
            self._fixed.append(learned.fixed_bytes)
        cost = learned.step_cost() if learned else None
        if cost is not None:
            self.fit.begin_with(cost)

    def take(self, window: Window) -> None:
        for sample in window.samples:
            self.fit.learn(sample.shape, sample.seconds * 1e9)
        self.ended += len(window.shapes)
        self._shapes.extend(window.shapes)
        if window.running_peak >= 2 and window.kv_peak:
            self._footprint = max(self._footprint * _FORGET, window.kv_peak / window.running_peak)
        if window.fixed_bytes is not None:
            self._fixed.append(window.fixed_bytes)

    def measured(self, space: Space) -> Space:
        """`space` with its lines where memory in use has been measured to put them; by the plan until it was."""
        measured, still = max(self._fixed, default=space.fixed_bytes), _STILL * space.resolved.memory_limit_bytes
        fixed = measured if abs(measured - space.fixed_bytes) > still else space.fixed_bytes
        return replace(space, fixed_bytes=fixed)

    @property
    def demand(self) -> Demand | None:
        """The mean request; None before some have ended."""
        if len(self._shapes) < 4:
            return None
        return Demand.of([(s.cached_tokens, s.prompt_tokens - s.cached_tokens, s.output_tokens) for s in self._shapes])

    def memory_rows(self, space: Space) -> int:
        """How many sequences may run so that the pool stays below the watermark. Each is charged what it was seen to
        hold at the busiest, and at least half of what its prompt and the learned percentile of answers come to."""
        size = space.resolved.block_size
        charge = 0.0
        if self._shapes:
            prompt = sum(one.prompt_tokens - one.cached_tokens for one in self._shapes) / len(self._shapes)
            charge = (prompt + self.output_quantile()) / size
        each = max(self._footprint, 0.5 * charge)
        if not each:
            return space.resolved.rows
        return max(1, min(space.resolved.rows, int(_ROOM * space.watermark_blocks / each)))

    def output_quantile(self) -> float:
        """Tokens that all but a tenth of the answers keep to; 0 before some have ended."""
        lengths = sorted(one.output_tokens for one in self._shapes)
        return float(lengths[min(len(lengths) - 1, int(QUANTILE * len(lengths)))]) if lengths else 0.0

    def learned(self, space: Space) -> Learned:
        cost, demand = self.fit.cost(), self.demand
        resolved = {name: value for name, value in asdict(space.resolved).items() if name != "reasons"}
        return Learned(
            cost=asdict(cost) if cost else {},
            cost_error=self.fit.error_ratio,
            prompt_tokens=demand.prompt_tokens if demand else 0.0,
            output_quantile=self.output_quantile(),
            footprint=self._footprint,
            fixed_bytes=max(self._fixed, default=0),
            resolved=resolved,
        )
