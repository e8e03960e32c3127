"""Checkpoint: the tensors of a model's safetensors files, by name, without reading what is not asked for.

Headers are read and checked first, so that a truncated file, a missing shard or tensor is an error before any memory is
taken. Tensors come as views of the file's mapping. Only safetensors: a pickle can run code, and is never opened.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engine.errors import CorruptModel
from engine.load.safetensors_file import read_header
from engine.packing import BLOCK, ROW_BLOCK_BYTES
from engine.quant.blocks import Blocks


class Checkpoint:
    """`blocks`: the block format of each tensor that is kept in one, by name (engine.manifest). Raises MissingShard,
    CorruptModel at once."""

    def __init__(self, paths: list[Path], blocks: dict[str, str] | None = None) -> None:
        self._blocks = blocks or {}
        self._dtypes: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open: dict[Path, safe_open] = {}
        for path in paths:
            for name, entry in read_header(path).items():
                self._files[name] = path
                self._shapes[name] = self._logical(name, entry.shape)
                self._dtypes[name] = entry.dtype

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises CorruptModel unless `name` exists with this shape."""
        found = self._shapes.get(name)
        if found is None:
            raise CorruptModel(f"the checkpoint has no tensor {name}", "is config.json that of these weights?")
        if found != shape:
            raise CorruptModel(f"tensor {name} has shape {list(found)}, expected {list(shape)}")

    def kind(self, name: str) -> str:
        """How it is stored: of engine.packing.KINDS."""
        return self._blocks.get(name) or self._dtypes[name]

    def _logical(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        block_bytes = ROW_BLOCK_BYTES.get(self._blocks.get(name, ""))
        if block_bytes is None:
            return shape
        if len(shape) != 2 or shape[1] % block_bytes:
            raise CorruptModel(f"tensor {name} is no row of {self._blocks[name]} blocks", "prepare the model again")
        return shape[0], shape[1] // block_bytes * BLOCK

    def weight(self, name: str) -> Tensor | Blocks:
        """A view of the file."""
        tensor = self._tensor(name)
        return Blocks(tensor, self._blocks[name]) if name in self._blocks else tensor

    def tensor(self, name: str) -> Tensor:
        """Plain numbers: a view of the file, or what its blocks stand for."""
        weight = self.weight(name)
        return weight.plain() if isinstance(weight, Blocks) else weight

    def _tensor(self, name: str) -> Tensor:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device="cpu")
        tensor: Tensor = self._open[path].get_tensor(name)
        return tensor


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
