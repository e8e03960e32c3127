"""How figures are kept: exact histograms for the scrape, and a sliding window of the last minute for people.

Owns `Histogram` (exact bucket counts, since the start) and `Window` (percentiles and sums over the last seconds, in
bounded memory). It must not know which figures there are. Enter at either.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

# A window's percentiles are right to half of this ratio between neighbouring cells (DDSketch, Masson et al. 2019).
_CELL_RATIO = 1.01
_PER_LOG = 1.0 / math.log(_CELL_RATIO)


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One observation that a trace explains."""

    trace_id: str
    value: float
    unix_seconds: float


class Histogram:
    """Counts per bucket of `bounds` (upper edges, inclusive), the last one open; optionally an exemplar per bucket."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(sorted(set(bounds)))
        self.counts = [0] * (len(self.bounds) + 1)
        self.exemplars: dict[int, Exemplar] = {}
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, value: float, exemplar: Exemplar | None = None, times: int = 1) -> None:
        """Count `value`, `times` times."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += times
        self.sum += value * times
        if exemplar is not None:
            self.exemplars[bucket] = exemplar

    def link(self, exemplar: Exemplar) -> None:
        """An exemplar of something that is counted already."""
        self.exemplars[bisect_left(self.bounds, exemplar.value)] = exemplar

    def add_all(self, values: Sequence[float]) -> None:
        """Count every one of `values`, which must be in ascending order: then it costs per bucket, not per value."""
        bounds, start = self.bounds, 0
        while start < len(values):
            bucket = bisect_left(bounds, values[start])
            end = bisect_right(values, bounds[bucket], start) if bucket < len(bounds) else len(values)
            self.counts[bucket] += end - start
            start = end
        self.sum += sum(values)

    def cumulative(self, buckets: Sequence[float]) -> list[tuple[float, int, Exemplar | None]]:
        """(edge, observations ≤ edge, an exemplar in that bucket) for each of `buckets` and infinity.

        One histogram can so be shown with several sets of buckets. Raises ValueError for an edge that it does not have.
        """
        shown: list[tuple[float, int, Exemplar | None]] = []
        total, start = 0, 0
        for edge in (*buckets, math.inf):
            end = len(self.counts) if edge == math.inf else bisect_left(self.bounds, edge) + 1
            if edge != math.inf and (end > len(self.bounds) or self.bounds[end - 1] != edge):
                raise ValueError(f"no bucket ends at {edge}")
            total += sum(self.counts[start:end])
            found = [self.exemplars[i] for i in range(start, end) if i in self.exemplars] if self.exemplars else []
            shown.append((edge, total, found[-1] if found else None))
            start = end
        return shown


@dataclass(slots=True)
class _Second:
    second: int = -1
    sums: dict[str, float] = field(default_factory=dict)
    cells: dict[str, dict[int, int]] = field(default_factory=dict)


class Window:
    """Sums and percentiles over the last `seconds`, one slot a second."""

    def __init__(self, seconds: int = 60) -> None:
        self.seconds = seconds
        self._slots = [_Second() for _ in range(seconds)]
        self._first_ns: int | None = None

    def count(self, at_ns: int, name: str, amount: float) -> None:
        """Add `amount` to the sum called `name`."""
        slot = self._slot(at_ns)
        if slot is not None:
            slot.sums[name] = slot.sums.get(name, 0.0) + amount

    def observe(self, at_ns: int, name: str, values: Sequence[float]) -> None:
        """Take `values` (ascending; zero counts as a nanosecond) into the distribution called `name`."""
        slot = self._slot(at_ns)
        if slot is None:
            return
        cells = slot.cells.setdefault(name, {})
        start = 0
        while start < len(values):
            cell = math.floor(math.log(max(values[start], 1e-9)) * _PER_LOG)
            end = max(start + 1, bisect_left(values, _CELL_RATIO ** (cell + 1), start))
            cells[cell] = cells.get(cell, 0) + end - start
            start = end

    def span_seconds(self, now_ns: int, seconds: int = 0) -> float:
        """Over how long the window's sums were collected: less than `seconds` in the beginning, at least one."""
        since_first = (now_ns - self._first_ns) / 1e9 if self._first_ns is not None else 0.0
        return min(float(seconds or self.seconds), max(1.0, since_first))

    def sums(self, now_ns: int, seconds: int = 0) -> dict[str, float]:
        """Every sum over the window that ends now, or over its last `seconds`."""
        total: dict[str, float] = {}
        for slot in self._live(now_ns, seconds):
            for name, amount in slot.sums.items():
                total[name] = total.get(name, 0.0) + amount
        return total

    def percentiles(self, now_ns: int, name: str, points: Sequence[float], seconds: int = 0) -> tuple[int, list[float]]:
        """How many observations, and the value at each of `points` (0–100; nearest rank, within 0.5 %)."""
        cells: dict[int, int] = {}
        for slot in self._live(now_ns, seconds):
            for cell, count in slot.cells.get(name, {}).items():
                cells[cell] = cells.get(cell, 0) + count
        ordered = sorted(cells.items())
        total = sum(cells.values())
        found: list[float] = []
        for point in points if total else ():
            rank, seen = max(1, math.ceil(point / 100 * total)), 0
            for cell, count in ordered:
                seen += count
                if seen >= rank:
                    found.append(_CELL_RATIO ** (cell + 0.5))
                    break
        return total, found

    def _slot(self, at_ns: int) -> _Second | None:
        if self._first_ns is None:
            self._first_ns = at_ns
        second = at_ns // 1_000_000_000
        slot = self._slots[second % len(self._slots)]
        if slot.second > second:
            return None  # older than the window
        if slot.second < second:
            slot.second, slot.sums, slot.cells = second, {}, {}
        return slot

    def _live(self, now_ns: int, seconds: int = 0) -> list[_Second]:
        now = now_ns // 1_000_000_000
        return [slot for slot in self._slots if now - (seconds or self.seconds) < slot.second <= now]
