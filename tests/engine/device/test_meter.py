"""Meters: what a device and a host say about memory, in the fields that forensics judges by.

fixture: no CUDA device is at hand where this runs. The figures and the shape of the snapshot are what torch 2.11 to
2.13 give (torch/cuda/memory.py, torch/cuda/_memory_viz.py); that torch still has these names is checked against its
source.
"""

import ctypes
import inspect
import mmap
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz, memory

from engine.autopsy import Autopsy
from engine.device.meter import CudaMeter, HostMeter
from engine.device.runner import translated
from engine.errors import OutOfMemory
from engine.plan import SeqSlice, StepPlan
from engine.report import StateFacts

MIB, GIB = 1 << 20, 1 << 30
MESSAGE = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 100.00 MiB is "
    "free. Including non-PyTorch memory, this process has 129.69 GiB memory in use. Of the allocated memory 126.00 GiB "
    "is allocated by PyTorch, and 3.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    "is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def snapshot(pieces: int, piece_bytes: int) -> list[dict[str, Any]]:
    """Segments of two devices: ours with `pieces` unused blocks beside as many in use, the other with one huge hole."""
    used = {"state": "active_allocated", "requested_size": MIB}
    waiting = {"state": "active_awaiting_free", "size": 8 * GIB}
    ours = [{"state": "inactive", "size": piece_bytes}, {**used, "size": piece_bytes}] * pieces
    return [
        {"device": 0, "total_size": 2 * pieces * piece_bytes, "blocks": [*ours, waiting]},
        {"device": 1, "total_size": 40 * GIB, "blocks": [{"state": "inactive", "size": 40 * GIB}]},
    ]


class Device:
    """torch.cuda's figures, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.total = 100 * MIB, 140 * GIB
        self.allocated, self.reserved = 126 * GIB, 129 * GIB
        self.segments = snapshot(12, 256 * MIB)
        for name, value in (
            ("mem_get_info", lambda device: (self.free, self.total)),
            ("memory_allocated", lambda device: self.allocated),
            ("memory_reserved", lambda device: self.reserved),
            ("memory_snapshot", lambda: self.segments),
            ("current_device", lambda: 0),
        ):
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_fixture_a_device_in_pieces(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    Device(monkeypatch)
    first, before, now = CudaMeter(torch.device(name)).readings()
    assert (now.scope, now.limit_bytes, now.free_bytes) == ("device", 140 * GIB, 100 * MIB)
    assert (now.own_bytes, now.allocator_free_bytes) == (126 * GIB, 3 * GIB)
    assert now.largest_free_bytes == 256 * MIB  # not the other device's, and not what still waits for a stream
    assert now.neighbour_bytes == 140 * GIB - 100 * MIB - 129 * GIB
    assert first is before is now  # none was taken before


def test_fixture_quiet_readings_are_cheap_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.allocated, device.reserved, device.free = 100 * GIB, 100 * GIB, 29 * GIB
    meter = CudaMeter(torch.device("cuda:0"))
    meter.before_step()
    device.allocated, device.reserved, device.free = 126 * GIB, 129 * GIB, 100 * MIB
    first, before, now = meter.readings()
    assert first.own_bytes == before.own_bytes == 100 * GIB
    assert first.largest_free_bytes is None  # walking the segments is for the moment of a fault
    assert now.own_bytes == 126 * GIB


def test_fixture_torchs_error_becomes_a_verdict_of_fragmentation(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.allocated, device.reserved, device.free = 126 * GIB, 126 * GIB, 3 * GIB + 100 * MIB
    meter = CudaMeter(torch.device("cuda:0"))
    meter.before_step()
    device.reserved, device.free = 129 * GIB, 100 * MIB
    with pytest.raises(OutOfMemory) as caught, translated():
        raise torch.OutOfMemoryError(MESSAGE)
    error = caught.value
    assert (error.requested_bytes, error.free_bytes) == (512 * MIB, 100 * MIB)
    error.phase, error.readings = "forward", meter.readings()
    piece = SeqSlice(row=0, start=0, count=512, sample=False)
    plan = StepPlan(step=9, slices=(piece,))
    state = StateFacts(
        running=1, waiting=0, preempted=0, kv_active=32, kv_cached=0, kv_free=9, kv_tail_slots=0, kv_stranded_blocks=0
    )
    incident = Autopsy().incident(plan, error, piece, "r1", state, [], 5)
    assert incident.cause == "fragmentation"
    assert "512.0 MiB" in incident.summary
    assert any("expandable_segments" in knob.advice for knob in incident.knobs)


def test_torch_still_has_the_names_that_the_meter_reads() -> None:
    assert "allocated_bytes.all.current" in inspect.getsource(memory.memory_allocated)
    assert "reserved_bytes.all.current" in inspect.getsource(memory.memory_reserved)
    assert '"segments"' in inspect.getsource(memory.memory_snapshot)
    assert "across all devices" in (memory.memory_snapshot.__doc__ or "")
    shape = inspect.getsource(_memory_viz)
    for name in ('"blocks"', '"state"', '"inactive"', '"active_allocated"', '"size"', '"device"'):
        assert name in shape, name


def test_a_host_says_which_limit_is_the_nearest() -> None:
    pool = mmap.mmap(-1, MIB)
    pool.write(b"x" * MIB)
    meter = HostMeter((ctypes.addressof(ctypes.c_char.from_buffer(pool)), MIB))
    meter.before_step()
    first, _, now = meter.readings()
    assert now.scope in ("host", "cgroup", "address_space")
    assert now.free_bytes is not None
    assert now.limit_bytes is not None
    assert now.free_bytes < now.limit_bytes
    assert (now.kv_bytes or 0) > 0.9 * MIB
    assert now.allocator_free_bytes is not None
    assert first.at_ns <= now.at_ns
