"""Change: what a rule proposes, and Known: what it may go by beside the window. Plain values.

It must not know how a change is applied, verified or undone: that is autotune/online.py. Enter at either.
"""

from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol

from autotune.costmodel import Demand, Forecast, forecast
from autotune.objective import Targets
from autotune.space import Space
from autotune.window import Window
from engine.budget import Limits
from engine.stepcost import StepCost

GROWTH = 1.5  # the most by which one careful step makes a limit larger


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """New values of some limits, as one. `goal` is the figure of the window that has to become better: goodput by
    growing, any other by falling; none of what only follows a measurement and is not judged. An `urgent` one waits for
    nobody, and is never taken back: it makes things safer."""

    changes: dict[str, int]
    why: str
    goal: str = "goodput"
    evidence: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    urgent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What was learned so far; None where it was too little. `memory_rows` is how many sequences keep what is in use
    below the watermark, each charged what such requests go on to need."""

    space: Space
    targets: Targets
    cost: StepCost | None = None
    cost_error: float = 0.0  # by what share of a step that cost is wrong, on average
    demand: Demand | None = None
    memory_rows: int = 1
    charge_tokens: int = 0  # that all but a few answers keep to
    ended: int = 0  # requests that this goes by

    def at(self, rows: float, chunk: float) -> Forecast | None:
        """The steady state with so many rows and such chunks, which shrink with the prompt behind them."""
        if self.cost is None or self.demand is None:
            return None
        doubling = self.space.resolved.context_doubling
        return forecast(self.cost, self.demand, rows, chunk * doubling / (doubling + self.demand.depth_tokens))

    def in_time(self, rows: int, chunk: int) -> bool:
        """Whether the target between tokens would be met, as far as is known: at the 95th percentile, so by the steps
        that carry a chunk if they are more than one in twenty."""
        target, there = self.targets.inter_token_s, self.at(rows, chunk)
        if not target or there is None:
            return True
        return (there.mixed_step_s if there.mixed_share > 0.05 else there.inter_token_s) <= 0.9 * target

    def best_rows(self, most: int, chunk: int) -> int:
        """The fewest rows that give the most tokens per second, within one per cent; not beyond what keeps time."""
        best, rate = 1, 0.0
        for rows in range(1, most + 1):
            there = self.at(rows, chunk)
            if there is None or (rows > 1 and not self.in_time(rows, chunk)):
                break
            if there.tokens_per_s > 1.01 * rate:
                best, rate = rows, there.tokens_per_s
        return best


class Rule(Protocol):
    """A module of autotune/rules. Pure."""

    def propose(self, window: Window, limits: Limits, known: Known) -> Change | None: ...


def name_of(rule: ModuleType) -> str:
    return rule.__name__.rsplit(".", 1)[-1]
