"""Is it noise? Ratios with intervals from repetitions, and trends with intervals from time series. Pure.

Owns the methods; the thresholds of what matters are the caller's. Enter at `ratio` and `trend`.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Student's t at 97.5 % by degrees of freedom; beyond them that of the normal distribution is near enough.
_T: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """`middle` of the new to the old, with its 95 % interval; None where there were no repetitions."""

    middle: float
    low: float | None
    high: float | None

    @property
    def noise(self) -> bool | None:
        """Whether the interval holds 1; None if there is none."""
        return None if self.low is None or self.high is None else self.low <= 1 <= self.high


def ratio(new: Sequence[float], old: Sequence[float], paired: bool) -> Ratio | None:
    """The ratio of geometric means; None where a value is not positive or there is none.

    Student's t over repetitions (over pairs of them, where the n-th of both sides was measured side by side), on
    logarithms. Not a percentile bootstrap: of three repetitions that calls noise a difference one time in four
    (Hesterberg, arXiv:1411.5279, section 4). Unpaired, the degrees of freedom are those of the smaller side, which is
    cautious.
    """
    if not new or not old or min(*new, *old) <= 0:
        return None
    logs_new, logs_old = [math.log(v) for v in new], [math.log(v) for v in old]
    count = min(len(new), len(old))
    paired = paired and len(new) == len(old)
    if paired:
        pairs = [a - b for a, b in zip(logs_new, logs_old, strict=True)]
        middle, error = statistics.fmean(pairs), _error(pairs)
    else:
        middle = statistics.fmean(logs_new) - statistics.fmean(logs_old)
        error = math.hypot(_error(logs_new), _error(logs_old))
    if count < 2:
        return Ratio(math.exp(middle), None, None)
    reach = error * _t(count - 1) if error > 1e-12 else 0.0
    return Ratio(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean: what a bootstrap of it converges to, with the correction for few values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _t(freedom: int) -> float:
    return _T[freedom - 1] if freedom <= len(_T) else 1.96


@dataclass(frozen=True, slots=True)
class Trend:
    """`slope` a second with its 95 % interval, and the `level` in the middle of the time looked at."""

    slope: float
    low: float
    high: float
    level: float
    seconds: float

    @property
    def drift(self) -> float:
        """What the slope adds up to over that time."""
        return self.slope * self.seconds

    @property
    def certain(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def trend(points: Sequence[tuple[float, float]], bins: int = 40) -> Trend | None:
    """Theil-Sen's slope with Sen's interval (Sen, 1968) over the medians of `bins` stretches, since samples that follow
    each other closely are not independent. None for fewer than eight stretches with a sample."""
    cells = _medians(points, bins)
    if len(cells) < 8:
        return None
    slopes = sorted(
        (y - before_y) / (x - before_x) for n, (x, y) in enumerate(cells) for before_x, before_y in cells[:n]
    )
    count = len(cells)
    reach = 1.96 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, round((len(slopes) - reach) / 2))
    high = min(len(slopes) - 1, round((len(slopes) + reach) / 2))
    return Trend(
        slope=statistics.median(slopes),
        low=slopes[low],
        high=slopes[high],
        level=statistics.median(y for _, y in cells),
        seconds=cells[-1][0] - cells[0][0],
    )


def _medians(points: Sequence[tuple[float, float]], bins: int) -> list[tuple[float, float]]:
    if not points:
        return []
    begin, end = min(x for x, _ in points), max(x for x, _ in points)
    width = (end - begin) / bins or 1.0
    cells: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        cells.setdefault(min(bins - 1, int((x - begin) / width)), []).append((x, y))
    return [
        (statistics.fmean(x for x, _ in cell), statistics.median(y for _, y in cell))
        for _, cell in sorted(cells.items())
    ]
