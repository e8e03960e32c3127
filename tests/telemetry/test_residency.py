"""Residency and the ledger's freeze: pages that exist are counted, and what was there first is told first."""

import ctypes
import mmap

import pytest

from telemetry import residency
from telemetry.ledger import Ledger

MIB = 1 << 20


def test_only_pages_that_were_written_are_resident_and_those_given_back_are_not() -> None:
    size = 8 * MIB
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    assert residency.resident_in(address, size) == 0
    for offset in range(0, 3 * MIB, mmap.PAGESIZE):
        mapping[offset] = 1
    assert residency.resident_in(address, size) == 3 * MIB
    mapping.madvise(mmap.MADV_DONTNEED, MIB, MIB)
    assert residency.resident_in(address, size) == 2 * MIB


def test_what_is_no_mapping_is_not_known() -> None:
    assert residency.resident_in(mmap.PAGESIZE, mmap.PAGESIZE) is None


def test_the_heap_says_what_it_holds() -> None:
    before = residency.heap()
    if before is None:
        pytest.skip("this C library gives no figures")
    held = ctypes.create_string_buffer(64 * MIB)
    after = residency.heap()
    assert after is not None
    assert after.in_use_bytes - before.in_use_bytes >= len(held)


def test_runtime_is_frozen_by_the_first_booking() -> None:
    ledger = Ledger()
    ledger.freeze("cpu", 10)
    with pytest.raises(ValueError, match="before the first booking"):
        ledger.freeze("cpu", 11)
    ledger.book("cpu", "weights", 5)
    assert ledger.owners("cpu") == {"runtime": 10, "weights": 5}
    other = Ledger()
    other.book("cpu", "weights", 5)
    with pytest.raises(ValueError, match="before the first booking"):
        other.freeze("cpu", 1)
