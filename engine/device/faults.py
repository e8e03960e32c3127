"""Faults for drills: real failures of the device plane, planted on demand while it serves.

Owns the faults and `FaultyMeter`, a meter that a planted fault takes the place of. It is handed to the runner only when
the daemon was started with --drill; nothing else knows that it exists, least of all who explains what then happens: a
fault speaks through the same readings and the same errors as any other memory does. Enter at `FaultyMeter.plant`.

A byte cap stands inside the tensor-allocation path, which compiled kernels share with torch's operators: it sees every
tensor that is made, counts those that live, and refuses like the allocator of torch's CPU does. The address-space limit
is the kernel's own, so there the allocator itself fails.
"""

import contextlib
import ctypes
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

from engine.device.meter import Meter, Readings
from engine.device.refusal import Counter, Tight
from engine.errors import ConfigError, MemoryReading
from telemetry.probe import virtual_bytes

_LEARNED_STEPS = 12  # observed before a cap is set
_SLACK_BYTES = 128 << 10  # by how much a heap grows at a time
_PIECE_BYTES = 64 << 10
_PIECES = 1024


class Fault:
    """Nothing, until a subclass says what. `over`: it is done and can be forgotten."""

    over = False

    @property
    def learning(self) -> bool:
        """Whether it watches typical steps first."""
        return False

    def before_step(self) -> None:
        """A quiet moment between two steps."""

    def step(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def readings(self) -> Readings | None:
        """None: the real meter's are the truth."""
        return None

    def amended(self, real: Readings) -> Readings:
        """The real meter's readings with what only the fault knows."""
        return real

    def end(self) -> None:
        """Give back what was taken."""


class FaultyMeter:
    """A meter (engine/device/meter.py) with at most one fault planted over it."""

    def __init__(self, real: Meter) -> None:
        self._real = real
        with Counter(lambda: 1 << 60), Tight(1 << 30):
            torch.ones(1)  # what torch imports for this takes a second: not in somebody's step
        self._fault = Fault()
        self._name = ""

    def plant(self, name: str, amount: int, kv_bytes: Callable[[], int]) -> str:
        """Begin a fault, in place of the one before; 'none' only ends that. `amount` is what FAULTS says of it.
        Raises ConfigError for one that is not known."""
        self._fault.end()
        self._fault, self._name = Fault(), ""
        if name != "none":
            if name not in FAULTS:
                raise ConfigError(f"no such fault: {name}", f"one of {', '.join(FAULTS)}")
            self._fault, self._name = FAULTS[name](amount, kv_bytes), name
        return self._name

    @property
    def planted(self) -> str:
        """The fault that is not over, and whether it still learns; empty if there is none."""
        return "" if self._fault.over else self._name + (" (learning)" if self._fault.learning else "")

    def before_step(self) -> None:
        if self._fault.over:
            self._fault.end()
            self._fault, self._name = Fault(), ""
        self._real.before_step()
        self._fault.before_step()

    def step(self) -> AbstractContextManager[object]:
        return self._fault.step()

    @property
    def peak_bytes(self) -> int:
        """Not measured: what faults do to a step's memory is not the step's."""
        return 0

    def readings(self) -> Readings:
        return self._fault.readings() or self._fault.amended(self._real.readings())


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
        self._peaks: deque[int] = deque(maxlen=_LEARNED_STEPS)
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
        if self._room_bytes is None and len(self._peaks) == _LEARNED_STEPS:
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
    nothing before the cache has grown. `amount`: bytes that it may grow by; 0 = a third of the largest step's peak."""

    def __init__(self, amount: int, kv_bytes: Callable[[], int]) -> None:
        super().__init__(0, kv_bytes)
        self._growth_bytes = amount
        self._least_bytes = kv_bytes()
        self._largest_bytes = 0

    def begin(self) -> None:
        self._least_bytes = self._kv_bytes()
        self._largest_bytes = max(self._peaks)

    def before_step(self) -> None:
        super().before_step()
        if self._room_bytes is not None and self._peaks:
            largest = self._largest_bytes = max(self._largest_bytes, *self._peaks)
            self._room_bytes = self._least_bytes + largest + (self._growth_bytes or largest // 3)
            self._before = self._reading(0)

    def _left(self) -> int:
        left = super()._left()
        return left if left < self._largest_bytes else 1 << 60

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


class AddressSpace(Fault):
    """RLIMIT_AS, so near that the allocator cannot get a large piece: it fails by itself. `amount`: bytes that the
    process may still map; 0 = enough for the largest tensor of a typical step, by what was seen."""

    failures = 2

    def __init__(self, amount: int, kv_bytes: Callable[[], int]) -> None:
        self._allowance_bytes = amount
        self._failed = 0
        self._largest: list[int] = []

    @property
    def learning(self) -> bool:
        """See Fault."""
        return not self._allowance_bytes

    @contextmanager
    def step(self) -> Iterator[None]:
        if self.learning:
            with Counter(lambda: 1 << 60) as counter:
                yield
            if counter.largest_bytes:
                self._largest.append(counter.largest_bytes)
            if len(self._largest) == _LEARNED_STEPS:
                self._allowance_bytes = 3 * max(self._largest) // 2 + _SLACK_BYTES
            return
        try:
            with Tight(self._allowance_bytes):
                yield
        except Exception:
            self._failed += 1
            self.over = self._failed >= self.failures
            raise

    def amended(self, real: Readings) -> Readings:
        """The limit is lifted by the time that anybody reads it: put it back into the last reading."""
        limit = virtual_bytes() + self._allowance_bytes
        now = replace(real[2], scope="address_space", limit_bytes=limit, free_bytes=self._allowance_bytes)
        return real[0], real[1], replace(now, neighbour_bytes=None)


class Fragments(AddressSpace):
    """The C library's heap in pieces of 64 KiB, every other one in use, and no address space for more. What settles in
    the holes meanwhile keeps the heap in pieces afterwards too: such an engine is best started again."""

    failures = 1

    def __init__(self, amount: int, kv_bytes: Callable[[], int]) -> None:
        super().__init__(amount or _SLACK_BYTES, kv_bytes)
        libc = self._libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        pieces = [libc.malloc(ctypes.c_size_t(_PIECE_BYTES)) for _ in range(_PIECES)]
        for piece in pieces[::2]:
            libc.free(ctypes.c_void_p(piece))
        self._pieces = pieces[1::2]

    def end(self) -> None:
        for piece in self._pieces:
            self._libc.free(ctypes.c_void_p(piece))
        self._pieces = []


class Stuck(Fault):
    """One step hangs inside C, where no other thread gets the interpreter. `amount`: milliseconds."""

    def __init__(self, amount: int, kv_bytes: Callable[[], int]) -> None:
        self._ms = amount

    @contextmanager
    def step(self) -> Iterator[None]:
        self.over = True
        end = time.monotonic() + self._ms / 1000
        while (left := end - time.monotonic()) > 0:  # a signal only interrupts it
            ctypes.PyDLL(None).usleep(int(1e6 * left))
        yield


FAULTS: dict[str, type[Any]] = {
    "capacity": Capacity,
    "greedy": Greedy,
    "leak": Leak,
    "full_pool": FullPool,
    "neighbour": Neighbour,
    "address_space": AddressSpace,
    "fragments": Fragments,
    "stuck": Stuck,
}


def _held_bytes(pid: int | None = None) -> int:
    """Resident bytes of a process, ours by default; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(status.split()[1]) * resource.getpagesize()
