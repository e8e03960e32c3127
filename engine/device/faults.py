"""Faults for drills: real failures of the device plane, planted on demand while it serves.

Owns `FaultyMeter`, a meter that a planted fault takes the place of, and the list of faults (caps.py, heapfaults.py).
It is handed to the runner only when the daemon was started with --drill; nothing else knows that it exists, least of
all who explains what then happens: a fault speaks through the same readings and the same errors as any other memory
does. Enter at `FaultyMeter.plant`.
"""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from engine.device.caps import Capacity, FullPool, Greedy, Leak, Neighbour
from engine.device.fault import Fault
from engine.device.heapfaults import AddressSpace, Fragments
from engine.device.meter import Meter, Readings
from engine.device.refusal import Counter, Tight
from engine.errors import ConfigError


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
