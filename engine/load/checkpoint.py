"""Checkpoint: the tensors of a model's safetensors files, by name, without reading what is not asked for.

Headers are read and checked first, so that a truncated file, a missing shard or tensor is an error before any memory is
taken. Tensors come as views of the file's mapping. Only safetensors: a pickle can run code, and is never opened.
"""

import json
import struct
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engine.errors import CorruptModel, MissingShard

_MOST_HEADER_BYTES = 100 << 20  # the format's own bound


class Checkpoint:
    """Raises MissingShard, CorruptModel at once."""

    def __init__(self, paths: list[Path]) -> None:
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open: dict[Path, safe_open] = {}
        for path in paths:
            for name, shape in read_header(path).items():
                self._files[name] = path
                self._shapes[name] = shape

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


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """name → shape. Raises MissingShard if there is no such file, CorruptModel if it is not whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _MOST_HEADER_BYTES):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"it has {size} bytes, its header promises {8 + length + end}")
        return {name: tuple(entry["shape"]) for name, entry in header.items()}
    except FileNotFoundError as error:
        raise MissingShard(f"weight file {path} is not there", "download the model again") from error
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise CorruptModel(f"{path} is damaged: {error}", "download the model again") from error


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
