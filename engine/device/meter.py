"""Meters: what memory looks like to the allocator that just failed, or that is about to be asked.

Owns how a host and a CUDA device are read, and which limit is the nearest one. It must not judge: readings go with the
OutOfMemory to the engine's loop. Enter at `Meter.before_step`, `step` and `readings`. No msgspec here: a reading is
engine/errors.py's.

On a host an allocation fails at the address-space limit (RLIMIT_AS); the control group's and the machine's limits kill
instead, but what they leave is read all the same. The nearest of the three is the one that is reported.
"""

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from engine.errors import MemoryReading
from telemetry import probe
from telemetry.residency import heap, resident_in

Readings = tuple[MemoryReading, MemoryReading, MemoryReading]  # the first, the last quiet one, and now
_REST = 500  # a measurement may cost one part in so many of the time
_LEAST_REST_NS = 200_000_000


class Meter(Protocol):
    """One per runner."""

    def before_step(self) -> None:
        """A quiet moment: nothing of a step exists. Measures if it is time to."""

    def step(self) -> AbstractContextManager[object]:
        """Around everything that a step allocates."""

    @property
    def peak_bytes(self) -> int:
        """What the step before had at its peak beside what outlives it; 0 if that one was not measured."""

    def readings(self) -> Readings:
        """When serving began, at the last quiet moment, and now."""


class _Sampled:
    """The first and the last quiet reading, and how seldom to take one."""

    def __init__(self, read: Callable[[bool], MemoryReading], clock: Callable[[], int]) -> None:
        self._read = read
        self._clock = clock
        self._first: MemoryReading | None = None
        self._before: MemoryReading | None = None
        self._not_before_ns = 0
        self.peak_bytes = 0

    def before_step(self) -> None:
        begun_ns = self._clock()
        if begun_ns < self._not_before_ns:
            return
        with contextlib.suppress(MemoryError):  # measuring takes a little, and must not be what fails
            self._before = self._read(False)
            self._first = self._first or self._before
        took_ns = self._clock() - begun_ns
        self._not_before_ns = begun_ns + max(_LEAST_REST_NS, _REST * took_ns)

    def step(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def readings(self) -> Readings:
        now = self._read(True)
        return self._first or now, self._before or now, now


class HostMeter(_Sampled):
    """This process on this host. `pool`: address and length of the KV pool's own mapping."""

    def __init__(self, pool: tuple[int, int], clock: Callable[[], int] = time.monotonic_ns) -> None:
        super().__init__(self._reading, clock)
        self._pool = pool
        self._peak_not_before_ns = 0

    def step(self) -> AbstractContextManager[object]:
        """One step in many is measured: by the process's high-water mark, which is set back before it."""
        self.peak_bytes = 0
        return self._measured() if self._clock() >= self._peak_not_before_ns else contextlib.nullcontext()

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        """An upper bound: all that the allocator had free before counts as used, and so do pages of files that came."""
        begun_ns = self._clock()
        pool_bytes, free_bytes, before_bytes = 0, 0, None
        with contextlib.suppress(MemoryError):
            pool_bytes, free = resident_in(*self._pool) or 0, heap()
            free_bytes = free.free_bytes if free else 0
            before_bytes = probe.high_water_bytes(reset=True)
        took_ns = self._clock() - begun_ns
        yield
        done_ns = self._clock()
        with contextlib.suppress(MemoryError):
            peak_bytes = probe.high_water_bytes()
            if before_bytes is not None and peak_bytes is not None:
                grown_bytes = peak_bytes - before_bytes - ((resident_in(*self._pool) or 0) - pool_bytes)
                self.peak_bytes = max(0, grown_bytes + free_bytes)
        took_ns += self._clock() - done_ns
        self._peak_not_before_ns = begun_ns + max(_LEAST_REST_NS, _REST * took_ns)

    def _reading(self, fully: bool) -> MemoryReading:
        kv = resident_in(*self._pool) or 0
        own = probe.resident()
        held = own.anonymous_bytes + own.shared_bytes if own else None
        scope, limit, free = probe.nearest_limit()
        heap_free, largest = _heap()
        return MemoryReading(
            at_ns=self._clock(),
            scope=scope,
            limit_bytes=limit,
            free_bytes=free,
            own_bytes=max(0, held - kv) if held is not None else None,
            kv_bytes=kv,
            neighbour_bytes=_neighbours(scope, limit, free, own.total_bytes if own else None),
            allocator_free_bytes=heap_free,
            largest_free_bytes=largest,
        )


class CudaMeter(_Sampled):
    """One CUDA device; the pool is fixed, so it is part of what we hold."""

    def __init__(self, device: torch.device, clock: Callable[[], int] = time.monotonic_ns) -> None:
        super().__init__(self._reading, clock)
        self._device = device

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        held_bytes = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        self.peak_bytes = max(0, torch.cuda.max_memory_allocated(self._device) - held_bytes)

    def step(self) -> AbstractContextManager[object]:
        """The allocator counts anyway: every step is measured."""
        return self._measured()

    def _reading(self, fully: bool) -> MemoryReading:
        free, total = torch.cuda.mem_get_info(self._device)
        used, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        largest = self._largest_free() if fully else None
        return MemoryReading(
            at_ns=self._clock(),
            scope="device",
            limit_bytes=total,
            free_bytes=free,
            own_bytes=used,
            neighbour_bytes=max(0, total - free - reserved),
            allocator_free_bytes=reserved - used,
            largest_free_bytes=largest,
        )

    def _largest_free(self) -> int:
        """The largest piece that torch's allocator holds unused on this device; its snapshot has every device's."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]
        blocks = [block for segment in segments for block in segment["blocks"]]
        return max((block["size"] for block in blocks if block["state"] == "inactive"), default=0)


def _neighbours(scope: str, limit: int | None, free: int | None, own: int | None) -> int | None:
    """What others use under a limit that is shared; the daemon counts as one of them."""
    if scope not in ("cgroup", "host") or limit is None or free is None or own is None:
        return None
    return max(0, limit - free - own)


def _heap() -> tuple[int | None, int | None]:
    """What the C library's allocator holds unused, and the largest piece of it: malloc_info(3), glibc."""
    text = malloc_info()
    if text is None:
        return None, None
    free = [int(size) for size in re.findall(r'<total type="(?:fast|rest)" count="\d+" size="(\d+)"/>', text)][-2:]
    pieces = re.findall(r'<(?:size|unsorted) from="\d+" to="(\d+)"', text)
    return sum(free), max(map(int, pieces), default=0)


def malloc_info() -> str | None:
    """The allocator's own account as XML, written to memory; None where there is none to be had."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_info"):
        return None
    libc.fdopen.restype = ctypes.c_void_p
    descriptor = os.memfd_create("inferd-heap", os.MFD_CLOEXEC)
    stream = libc.fdopen(os.dup(descriptor), b"w")
    try:
        if not stream or libc.malloc_info(0, ctypes.c_void_p(stream)) != 0:
            return None
        libc.fflush(ctypes.c_void_p(stream))
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, size, 0).decode("ascii", errors="replace")
    finally:
        if stream:
            libc.fclose(ctypes.c_void_p(stream))
        os.close(descriptor)
