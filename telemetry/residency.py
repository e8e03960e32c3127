"""Residency: what the kernel and the C library say about memory of our own process, by address.

Owns two questions of libc: which pages of a mapping exist (mincore), and what the allocator holds (mallinfo2). 'Not
available' (another C library) is a value: None. Enter at either; the probe beside it reads what other processes could
read too.
"""

import ctypes
import mmap
from dataclasses import dataclass

_CHUNK_BYTES = 1 << 30  # of a mapping that is asked about at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Heap:
    """The C library's allocator. `free_bytes` lie between what is in use, for its next callers; of those,
    `top_bytes` are one piece at the end of the main heap."""

    in_use_bytes: int
    free_bytes: int
    top_bytes: int


class _Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and later: mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def resident_in(address: int, length: int) -> int | None:
    """Bytes of our mapping at `address` (page-aligned) whose pages are in memory; None if the kernel does not say.
    About a millisecond a GiB."""
    libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    found = 0
    for offset in range(0, length, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, length - offset)
        pages = (ctypes.c_ubyte * -(-size // page))()
        if libc.mincore(ctypes.c_void_p(address + offset), ctypes.c_size_t(size), pages) != 0:
            return None
        found += bytes(pages).count(1)
    return found * page


def heap() -> Heap | None:
    """The allocator's own figures, or None where the C library does not give them."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return Heap(in_use_bytes=info.uordblks + info.hblkhd, free_bytes=info.fordblks, top_bytes=info.keepcost)
