"""safetensors files as bytes: reading and checking headers, and writing a file tensor by tensor.

Owns the file format (github.com/huggingface/safetensors: 8 bytes of header length, JSON, data). Stdlib only, so that
checking or writing a model needs no torch and never holds it in memory; `engine.load.checkpoint` makes tensors of what
it finds. Enter at `read_header` and `write`.
"""

import json
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from engine.errors import CorruptModel, MissingShard

_MOST_HEADER_BYTES = 100 << 20  # the format's own bound
_ALIGNMENT = 64  # of the first tensor: the format asks for 8, a cache line is kinder to the readers
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its dtype as the format names it, its shape, and how many bytes it takes."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def items(self) -> int:
        return prod(self.shape)


def entry(dtype: str, shape: Sequence[int]) -> Entry:
    """An Entry of a dtype in ITEM_BYTES."""
    return Entry(dtype, tuple(shape), prod(shape) * ITEM_BYTES[dtype])


def read_header(path: Path) -> dict[str, Entry]:
    """name → Entry. Raises MissingShard if there is no such file, CorruptModel if it is not whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _MOST_HEADER_BYTES):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((value["data_offsets"][1] for value in header.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"it has {size} bytes, its header promises {8 + length + end}")
        return {name: _entry(value) for name, value in header.items()}
    except FileNotFoundError as error:
        raise MissingShard(f"weight file {path} is not there", "download the model again") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CorruptModel(f"{path} is damaged: {error}", "download the model again") from error


def _entry(value: dict[str, Any]) -> Entry:
    dtype, shape, (begin, end) = str(value["dtype"]), tuple(int(n) for n in value["shape"]), value["data_offsets"]
    found = Entry(dtype, shape, int(end) - int(begin))
    if dtype in ITEM_BYTES and found != entry(dtype, shape):
        raise ValueError(f"{found.bytes} bytes for a {dtype} tensor of shape {list(shape)}")
    return found


def write(
    path: Path,
    entries: dict[str, Entry],
    pieces: Callable[[str], Iterable[bytes | memoryview]],
    wrote: Callable[[int], None],
) -> None:
    """Write a new file. `pieces(name)` yields a tensor's bytes in order, so that no more than a piece is in memory;
    `wrote` is told how many bytes each piece had. The file is synced to the disk. Raises OSError (a full disk)."""
    header: dict[str, dict[str, object]] = {}
    offset = 0
    for name, each in entries.items():
        header[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": (offset, offset + each.bytes)}
        offset += each.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        # Reserved at once: a disk that is too small says so before minutes of work, and not in the middle.
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + offset)
        file.write(struct.pack("<Q", len(text)) + text)
        for name, each in entries.items():
            left = each.bytes
            for piece in pieces(name):
                file.write(piece)
                left -= len(piece)
                wrote(len(piece))
            if left:
                raise AssertionError(f"{name}: {left} bytes too few were produced")
        file.flush()
        os.fsync(file.fileno())
