"""Heap faults: the address-space limit is the kernel's own, so here the allocator itself fails.

Owns what the C library's heap is made to look like. Enter at `AddressSpace` and `Fragments`.
"""

import ctypes
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from engine.device.fault import LEARNED_STEPS, Fault
from engine.device.meter import Readings
from engine.device.refusal import Counter, Tight
from telemetry.probe import virtual_bytes

_SLACK_BYTES = 128 << 10  # by how much a heap grows at a time
_PIECE_BYTES = 64 << 10
_PIECES = 1024


class AddressSpace(Fault):
    """RLIMIT_AS, so near that the allocator cannot get a large piece: it fails by itself. What the heap has left over
    from before is put aside, or it would serve. `amount`: bytes that the process may still map; 0 = enough for the
    largest tensor of a typical step, by what was seen."""

    failures = 2

    def __init__(self, amount: int, kv_bytes: Callable[[], int]) -> None:
        libc = self._libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        self._pieces = _left_over(libc)
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
            if len(self._largest) == LEARNED_STEPS:
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

    def end(self) -> None:
        for piece in self._pieces:
            self._libc.free(ctypes.c_void_p(piece))
        self._pieces = []


class Fragments(AddressSpace):
    """The C library's heap in pieces of 64 KiB, every other one in use, and no address space for more. What settles in
    the holes meanwhile keeps the heap in pieces afterwards too: such an engine is best started again."""

    failures = 1

    def __init__(self, amount: int, kv_bytes: Callable[[], int]) -> None:
        super().__init__(amount or _SLACK_BYTES, kv_bytes)
        pieces = [self._libc.malloc(ctypes.c_size_t(_PIECE_BYTES)) for _ in range(_PIECES)]
        for piece in pieces[::2]:
            self._libc.free(ctypes.c_void_p(piece))
        self._pieces += pieces[1::2]


def _left_over(libc: ctypes.CDLL) -> list[int]:
    """Pieces that take up what is free in the C library's heap, for `free`."""
    pieces: list[int] = []
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (virtual_bytes(), before[1]))
    try:
        while piece := libc.malloc(ctypes.c_size_t(_PIECE_BYTES)):
            pieces.append(piece)
    except MemoryError:  # of the interpreter's own: as full as it can be
        pass
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return pieces
