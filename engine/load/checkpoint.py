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


class Checkpoint:
    """Raises MissingShard, CorruptModel at once."""

    def __init__(self, paths: list[Path]) -> None:
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open: dict[Path, safe_open] = {}
        for path in paths:
            for name, entry in read_header(path).items():
                self._files[name] = path
                self._shapes[name] = entry.shape

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises CorruptModel unless `name` exists with this shape."""
        found = self._shapes.get(name)
        if found is None:
            raise CorruptModel(f"the checkpoint has no tensor {name}", "is config.json that of these weights?")
        if found != shape:
            raise CorruptModel(f"tensor {name} has shape {list(found)}, expected {list(shape)}")

    def tensor(self, name: str) -> Tensor:
        """A view of the file."""
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device="cpu")
        tensor: Tensor = self._open[path].get_tensor(name)
        return tensor


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
