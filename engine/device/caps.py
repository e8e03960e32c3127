"""Caps: faults that limit what a step may hold, in bytes of our own counting, and who else takes the room.

A cap stands inside the tensor-allocation path, which compiled kernels share with torch's operators: it sees every
tensor that is made, counts those that live, and refuses like the allocator of torch's CPU does. Enter at `Cap`.
"""

import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median_low

import torch

from engine.device.fault import LEARNED_STEPS, Fault
from engine.device.meter import Readings
from engine.device.refusal import Counter
from engine.errors import MemoryReading

_SEEN_STEPS = 8  # beside a cache that has grown, before anything is refused


class Cap(Fault):
    """A limit of our own on what a step may hold, set once typical steps were seen: `share` of the largest (or, with
    `of_typical`, the median) step's peak. It lifts after `failures` of them. Subclasses add who else takes the room."""

    scope = "process"
    share = 1.5
    of_typical = False
    failures = 1

    def __init__(self, amount: int, kv_bytes: Callable[[], int]) -> None:
        self._amount = amount
        self._kv_bytes = kv_bytes
        self._peaks: deque[int] = deque(maxlen=LEARNED_STEPS)
        self._room_bytes: int | None = None  # None while it learns
        self._counter: Counter | None = None
        self._failed = 0
        self._own_bytes = _held_bytes()
        self._first: MemoryReading | None = None
        self._before: MemoryReading | None = None

    @property
    def learning(self) -> bool:
        """See Fault."""
        return self._room_bytes is None

    def taken_bytes(self) -> int:
        """Of the room, by others than the step."""
        return 0

    def before_step(self) -> None:
        self._counter = None
        if self._room_bytes is None and len(self._peaks) == LEARNED_STEPS:
            reference = median_low(self._peaks) if self.of_typical else max(self._peaks)
            self._room_bytes = self._amount or int(self.share * reference)
            self.begin()
            self._first = self._reading(0)
        if self._room_bytes is not None:
            self._before = self._reading(0)

    def begin(self) -> None:
        """The cap is set from now on."""

    @contextmanager
    def step(self) -> Iterator[None]:
        counter = self._counter = Counter(self._left)
        try:
            with counter:
                yield
        except Exception:
            self._failed += self._room_bytes is not None
            self.over = self._failed >= self.failures
            raise
        if counter.peak_bytes:
            self._peaks.append(counter.peak_bytes)

    def _left(self) -> int:
        return 1 << 60 if self._room_bytes is None else self._room_bytes - self.taken_bytes()

    def readings(self) -> Readings | None:
        if self._first is None or self._before is None:
            return None
        return self._first, self._before, self._reading(self._counter.live_bytes if self._counter else 0)

    def _reading(self, live_bytes: int) -> MemoryReading:
        room = self._room_bytes or 0
        return MemoryReading(
            at_ns=time.monotonic_ns(),
            scope=self.scope,
            limit_bytes=self._own_bytes + room,
            free_bytes=max(0, room - self.taken_bytes() - live_bytes),
            own_bytes=self._own_bytes + self.kept_bytes(),
            kv_bytes=self.counted_kv_bytes(),
            neighbour_bytes=self.neighbour_bytes(),
            typical_step_bytes=median_low(self._peaks) if self._peaks else None,
        )

    def kept_bytes(self) -> int:
        return 0

    def counted_kv_bytes(self) -> int | None:
        return None

    def neighbour_bytes(self) -> int | None:
        return None


class Capacity(Cap):
    """Too small a limit for a step like the others. `amount`: bytes that a step may hold; 0 = by what was seen."""

    share = 0.6
    of_typical = True


class Greedy(Cap):
    """A limit that typical steps keep to, and one request does not. `amount` as for Capacity."""

    share = 2.5
    of_typical = True
    failures = 2


class Leak(Cap):
    """Every step leaves a tensor behind, until there is no room. `amount`: bytes a step; 0 = 256 KiB."""

    def __init__(self, amount: int, kv_bytes: Callable[[], int]) -> None:
        super().__init__(0, kv_bytes)
        self._each_bytes = amount or 256 << 10
        self._kept: list[torch.Tensor] = []

    def begin(self) -> None:
        self._room_bytes = (self._room_bytes or 0) + 16 * self._each_bytes

    def before_step(self) -> None:
        super().before_step()
        if self._room_bytes is not None:
            self._kept.append(torch.ones(self._each_bytes, dtype=torch.uint8))
            self._before = self._reading(0)

    def taken_bytes(self) -> int:
        return self.kept_bytes()

    def kept_bytes(self) -> int:
        return sum(tensor.numel() for tensor in self._kept)

    def end(self) -> None:
        self._kept.clear()


class FullPool(Cap):
    """A limit that the KV cache grows into: as much as the largest step needs, beside so much of the cache. It refuses
    nothing before the cache has grown and steps beside such a cache were seen: those that fill it are larger than
    others. `amount`: bytes that it may grow by, beyond the most there was of it at first; 0 = a third of the largest
    step's peak, and as much again as there was."""

    def __init__(self, amount: int, kv_bytes: Callable[[], int]) -> None:
        super().__init__(0, kv_bytes)
        self._growth_bytes = amount
        self._least_bytes = 0
        self._largest_bytes = 0
        self._grown_steps = 0  # in which the cache was larger than the limit allows

    def begin(self) -> None:
        self._largest_bytes = max(self._peaks)

    def before_step(self) -> None:
        if self.learning:
            self._least_bytes = max(self._least_bytes, self._kv_bytes())
        super().before_step()
        if self._room_bytes is not None and self._peaks:
            largest = self._largest_bytes = max(self._largest_bytes, *self._peaks)
            growth = self._growth_bytes or largest // 3 + self._least_bytes
            self._room_bytes = self._least_bytes + largest + growth
            self._grown_steps += self._kv_bytes() - self._least_bytes > growth
            self._before = self._reading(0)

    def _left(self) -> int:
        left = super()._left()
        return left if self._grown_steps > _SEEN_STEPS and left < self._largest_bytes else 1 << 60

    def taken_bytes(self) -> int:
        return self._kv_bytes()

    def counted_kv_bytes(self) -> int | None:
        return self._kv_bytes()


class Neighbour(Cap):
    """A limit that another process shares and grows under. `amount`: that process's id."""

    scope = "device"

    def __init__(self, amount: int, kv_bytes: Callable[[], int]) -> None:
        super().__init__(0, kv_bytes)
        self._pid = amount
        self._at_start_bytes = 0

    def begin(self) -> None:
        self._at_start_bytes = self.neighbour_bytes() or 0
        self._room_bytes = (self._room_bytes or 0) + (8 << 20)

    def taken_bytes(self) -> int:
        return max(0, (self.neighbour_bytes() or 0) - self._at_start_bytes)

    def neighbour_bytes(self) -> int | None:
        return _held_bytes(self._pid)


def _held_bytes(pid: int | None = None) -> int:
    """Resident bytes of a process, ours by default; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(status.split()[1]) * resource.getpagesize()
