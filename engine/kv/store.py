"""The tensors behind the KV blocks: one reservation for the pool's ceiling, given back in pieces where possible.

Layout per layer, keys and values apart: [KV heads, blocks, block size, head size]. Head-major, so that a run of blocks
is one contiguous strip per head: attention reads a context in one run as a view, and a strip of a block is a multiple
of a page (16 x 64 fp32 = 4 KiB), so freed blocks can be returned to the system. It must not know sequences or tables.
"""

import mmap

import torch
from torch import Tensor

from engine.budget import Resolved
from engine.modelspec import ModelSpec

_PAGE = mmap.PAGESIZE


class KVStore:
    """`keys[layer]` and `values[layer]` are [KV heads, slots, head size], slot = block * block_size + offset."""

    def __init__(self, spec: ModelSpec, resolved: Resolved) -> None:
        dtype = getattr(torch, resolved.kv_dtype)
        shape = (spec.num_layers, 2, spec.num_kv_heads, resolved.kv_blocks, resolved.block_size, spec.head_dim)
        self._mapping: mmap.mmap | None = None
        if resolved.device == "cpu":
            count = torch.Size(shape).numel()
            # Anonymous: pages exist once written. Private: of a shared mapping (mmap's default) MADV_DONTNEED would
            # only hide the pages from this process, and the system would keep them.
            self._mapping = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._pool = torch.frombuffer(self._mapping, dtype=dtype, count=count).view(shape)
        else:
            self._pool = torch.zeros(shape, dtype=dtype, device=resolved.device)
        flat = self._pool.view(spec.num_layers, 2, spec.num_kv_heads, -1, spec.head_dim)
        self.keys: list[Tensor] = [flat[layer, 0] for layer in range(spec.num_layers)]
        self.values: list[Tensor] = [flat[layer, 1] for layer in range(spec.num_layers)]

    @property
    def bytes(self) -> int:
        return self._pool.numel() * self._pool.element_size()

    @property
    def mapped(self) -> tuple[int, int] | None:
        """Address and length of the pool's own mapping; None on a device, whose memory is taken whole."""
        return (self._pool.data_ptr(), len(self._mapping)) if self._mapping is not None else None

    def copy(self, source: int, target: int) -> None:
        """Copy one block, all layers."""
        self._pool[:, :, :, target] = self._pool[:, :, :, source]

    def discard(self, blocks: tuple[int, ...]) -> None:
        """Give the memory of free blocks back to the system; their content is lost. Only whole pages are returned."""
        if self._mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        layers, kinds, heads, count, *block = self._pool.shape
        block_bytes = torch.Size(block).numel() * self._pool.element_size()
        for first, length in _runs(blocks):
            for strip in range(layers * kinds * heads):
                self._return((strip * count + first) * block_bytes, length * block_bytes)

    def _return(self, begin: int, length: int) -> None:
        assert self._mapping is not None
        aligned = -(-begin // _PAGE) * _PAGE
        end = (begin + length) // _PAGE * _PAGE
        if end > aligned:
            self._mapping.madvise(mmap.MADV_DONTNEED, aligned, end - aligned)


def _runs(blocks: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first, count) of each run of consecutive ids."""
    runs: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
