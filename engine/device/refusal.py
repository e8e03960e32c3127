"""Refusals: two ways in which a tensor's memory can really be refused, both inside the path that every operator takes.

Owns the counting of what lives and the address-space limit around an operator. It must not know which fault wants it
(caps.py, heapfaults.py), and nothing but a drill enters here. Enter at `Counter` and `Tight`, as context managers.
"""

import ctypes
import resource
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from telemetry.probe import virtual_bytes


class Counter(TorchDispatchMode):
    """Counts the bytes of tensors made while it is entered, and refuses what `room` does not hold. Compiled kernels
    write into tensors that torch makes for them (engine/kernels/native.py), so theirs are among those."""

    def __init__(self, room: Callable[[], int]) -> None:
        super().__init__()
        self._room = room
        self._live: list[tuple[StorageWeakRef, int]] = []
        self.peak_bytes = self.largest_bytes = 0

    @property
    def live_bytes(self) -> int:
        self._live = [(ref, size) for ref, size in self._live if not ref.expired()]
        return sum(size for _, size in self._live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            if tensor.untyped_storage().data_ptr() not in given:
                self._count(tensor)
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        live = self.live_bytes
        if live + size > self._room():
            raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size} bytes.")
        self._live.append((StorageWeakRef(storage), size))
        self.peak_bytes = max(self.peak_bytes, live + size)
        self.largest_bytes = max(self.largest_bytes, size)


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors in `values` that have a storage: packed weights have none."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and not leaf.is_mkldnn]


class Tight(TorchDispatchMode):
    """Every operator that only makes a tensor runs below an address-space limit (RLIMIT_AS) that leaves it `allowance`
    bytes. Torch's products run without: oneDNN and its compiler die of such a limit instead of reporting it."""

    def __init__(self, allowance_bytes: int) -> None:
        super().__init__()
        self._allowance_bytes = allowance_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten" or "mm" in func.__name__:
            return func(*args, **(kwargs or {}))
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps at the heap's end would serve us
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (virtual_bytes() + self._allowance_bytes, before[1]))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
