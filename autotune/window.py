"""Window: what the tuner sees of one control period, as flat figures. Pure.

Owns the figures' meaning. It must not know rules. `Gauge` collects one from single observations, as the simulator makes
them; autotune/watch.py makes one from Snapshots.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from autotune.objective import Targets, goodput
from engine.stepcost import StepShape

_COUNTS: Final = ("output_tokens", "prefill_tokens", "lost_tokens", "finished", "good", "shed")
_MEANS: Final = ("running", "waiting", "capacity", "blocked", "budget", "kv")
_CELL: Final = math.log(1.02)  # percentiles are right to a hundredth


@dataclass(frozen=True, slots=True)
class Sample:
    """A step, or the mean of several alike: what it computed, and how long it took."""

    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A request that ended."""

    prompt_tokens: int  # of which `cached_tokens` needed no computing
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One control period. Means are over its busy time; blocks are KV blocks; None is 'not reported'."""

    seconds: float
    busy_s: float = 0.0  # with something running
    output_tokens: int = 0
    prefill_tokens: int = 0
    lost_tokens: int = 0  # computed positions that preemptions threw away
    finished: int = 0  # served to their end
    good: int = 0  # of these, those that met every target and were not truncated
    shed: int = 0
    ttft_p95_s: float | None = None
    inter_token_p95_s: float | None = None
    running: float = 0.0
    running_peak: int = 0
    waiting: float = 0.0
    waiting_capacity: float = 0.0
    waiting_kv: float = 0.0
    waiting_budget: float = 0.0
    kv_peak: int = 0  # most blocks active
    kv_mean: float = 0.0
    largest_blocks: int = 0  # of one request
    fixed_bytes: int | None = None  # in use beside the active blocks
    samples: tuple[Sample, ...] = ()
    shapes: tuple[Shape, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def goodput(self) -> float:
        return goodput(self.tokens_per_s, self.finished + self.shed, self.good)

    @property
    def idle(self) -> bool:
        """Too little happened to learn anything from."""
        return self.busy_s < 0.2 * self.seconds or self.output_tokens + self.prefill_tokens == 0


class Cells:
    """A distribution in logarithmic cells; observations may carry a weight."""

    __slots__ = ("cells", "count", "total")

    def __init__(self) -> None:
        self.cells: dict[int, int] = {}
        self.count = 0
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        cell = math.floor(math.log(max(value, 1e-9)) / _CELL)
        self.cells[cell] = self.cells.get(cell, 0) + times
        self.count += times
        self.total += value * times

    @property
    def mean(self) -> float:
        """0 of nothing."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float | None:
        """Nearest rank; None of nothing."""
        seen, rank = 0, max(1, math.ceil(percent / 100 * self.count))
        for cell in sorted(self.cells):
            seen += self.cells[cell]
            if seen >= rank:
                return math.exp((cell + 0.5) * _CELL)
        return None


@dataclass(slots=True)
class Gauge:
    """Collects a Window. `busy` is told of every stretch of serving, the others of what happened."""

    targets: Targets
    ttft: Cells = field(default_factory=Cells)
    gaps: Cells = field(default_factory=Cells)
    samples: list[Sample] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    means: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_MEANS, 0.0))
    busy_s: float = 0.0
    running_peak: int = 0
    kv_peak: int = 0
    largest_blocks: int = 0

    def busy(self, seconds: float, steps: int, sample: Sample, now: Mapping[str, float]) -> None:
        """`steps` alike took `seconds` together; `now` has what _MEANS names, as of their end."""
        self.busy_s += seconds
        for name in _MEANS:
            self.means[name] += now[name] * seconds
        self.running_peak = max(self.running_peak, int(now["running"]))
        self.kv_peak = max(self.kv_peak, int(now["kv"]))
        if len(self.samples) < 24:  # enough to learn from
            self.samples.append(sample)

    def ended(self, shape: Shape, ttft_s: float, inter_token_s: float, truncated: bool) -> bool:
        """A request was served to its end. Whether it counts."""
        good = not truncated and self.targets.met(ttft_s, inter_token_s)
        self.figures["finished"] += 1
        self.figures["good"] += good
        self.shapes.append(shape)
        return good

    def window(self, seconds: float, fixed_bytes: int | None = None) -> Window:
        """What was collected; the next one begins empty by a new Gauge."""
        mean = {name: total / self.busy_s if self.busy_s else 0.0 for name, total in self.means.items()}
        return Window(
            seconds=seconds,
            busy_s=self.busy_s,
            **self.figures,
            ttft_p95_s=self.ttft.percentile(95),
            inter_token_p95_s=self.gaps.percentile(95),
            running=mean["running"],
            running_peak=self.running_peak,
            waiting=mean["waiting"],
            waiting_capacity=mean["capacity"],
            waiting_kv=mean["blocked"],
            waiting_budget=mean["budget"],
            kv_peak=self.kv_peak,
            kv_mean=mean["kv"],
            largest_blocks=self.largest_blocks,
            fixed_bytes=fixed_bytes,
            samples=tuple(self.samples),
            shapes=tuple(self.shapes),
        )
