"""GGUF files: the header as plain values, and tensors dequantized a few rows at a time.

Owns the file format (github.com/ggml-org/ggml/blob/master/docs/gguf.md). The header is checked against the file's size
before anything is allocated. It is parsed here and not by the gguf package, which needs seconds for a large vocabulary;
the block formats are the package's. Names are `engine.names`' affair. Enter at `Gguf.open`.
"""

import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, dequantize

from engine.errors import CorruptModel, UnknownArchitecture
from engine.load.safetensors_file import Entry, entry
from engine.modelspec import ModelSpec, from_gguf_metadata
from engine.names import hugging_face_name
from engine.packing import ROW_BLOCK_BYTES

# ggml's type id → (name, elements of a block, bytes of a block)
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_PLAIN = ("F32", "F16", "BF16")  # kept as they are: safetensors has them too
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_ROPE_FACTORS = "rope_freqs.weight"
_MOST_DIMENSIONS = 4
_PIECE_BYTES = 32 << 20  # of dequantized rows in memory at once


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` is row-major, as numpy has it (the file lists it the other way round)."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int  # from the file's start
    bytes: int

    @property
    def converted(self) -> Entry:
        """Its plain numbers in safetensors: F32, F16 and BF16 stay, blocks become F32."""
        return entry(self.type if self.type in _PLAIN else "F32", self.shape)

    @property
    def kept(self) -> str:
        """The block format that it keeps in a prepared model; empty if it is converted."""
        return self.type if self.type in ROW_BLOCK_BYTES and len(self.shape) == 2 else ""

    @property
    def stored(self) -> Entry:
        """What it is in a prepared model: rows of blocks as bytes, or `converted`."""
        return entry("U8", (self.shape[0], self.bytes // self.shape[0])) if self.kept else self.converted


class Gguf:
    """One file, mapped: `metadata` (str, int, float, bool and lists of these) and `tensors` by name."""

    def __init__(self, data: mmap.mmap, metadata: dict[str, Any], tensors: dict[str, GgufTensor]) -> None:
        self._data = data
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: Path) -> "Gguf":
        """Raises CorruptModel for a file that is not whole, UnknownArchitecture for formats that are not read."""
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return cls(data, *_parse(data))
        except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
            raise CorruptModel(f"{path} is damaged or no GGUF: {error}", "download the model again") from error

    def spec(self) -> ModelSpec:
        """The numbers of the model. Raises UnknownArchitecture, CorruptModel."""
        factors = tuple(float(f) for f in self.array(_ROPE_FACTORS)) if _ROPE_FACTORS in self.tensors else ()
        has = self.tensors.__contains__
        return from_gguf_metadata(
            self.metadata,
            tied=not has("output.weight"),
            bias=has("blk.0.attn_q.bias"),
            out_bias=has("blk.0.attn_output.bias"),
            mlp_bias=has("blk.0.ffn_down.bias"),
            rope_factors=factors,
        )

    def entries(self) -> dict[str, Entry]:
        """What the tensors are as plain numbers, by Hugging Face name. Raises UnknownArchitecture for a tensor that no
        served family has: to leave it out would change what the model says."""
        found = {}
        for name, tensor in self.tensors.items():
            if name == _ROPE_FACTORS:
                continue
            ours = hugging_face_name(name)
            if ours is None:
                raise UnknownArchitecture(f"the GGUF has a tensor {name}, which no served family has")
            found[ours] = tensor.converted
        return found

    def bytes_by_type(self) -> dict[str, int]:
        """Bytes in the file by ggml's type."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.type] += tensor.bytes
        return dict(counts)

    def pieces(self, name: str, interleaved: int | None = None) -> Iterator[memoryview]:
        """The bytes of a tensor as `stored`, some rows at a time. `interleaved`: undo, within each run of so many
        rows, the order that llama.cpp gives to rotated pairs (see `_halves`)."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.bytes, tensor.offset)
        # A vector is a column of rows, so that a reordered bias is cut like its weight.
        columns = tensor.shape[-1] if len(tensor.shape) > 1 or tensor.type not in _PLAIN else 1
        rows = prod(tensor.shape) // columns
        raw = raw.reshape(rows, -1)
        unit = interleaved or 1
        step = max(1, _PIECE_BYTES // (columns * 4 * unit)) * unit
        for begin in range(0, rows, step):
            values = raw[begin : begin + step] if tensor.kept else _values(raw[begin : begin + step], tensor.type)
            yield np.ascontiguousarray(_halves(values, interleaved) if interleaved else values).data.cast("B")

    def array(self, name: str) -> np.ndarray:
        """A whole small tensor as float32."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.bytes, tensor.offset)
        return _dequantized(raw.reshape(prod(tensor.shape[:-1]), -1), tensor.type).reshape(tensor.shape)


def _values(rows: np.ndarray, kind: str) -> np.ndarray:
    """Rows of blocks → float32; rows of plain numbers → the same bits, as 2- or 4-byte items."""
    if kind in _PLAIN:
        return rows.view(np.uint32 if kind == "F32" else np.uint16)
    return _dequantized(rows, kind)


def _dequantized(rows: np.ndarray, kind: str) -> np.ndarray:
    if kind in ("F32", "F16"):
        return rows.view(np.float32 if kind == "F32" else np.float16).astype(np.float32)
    values: np.ndarray = dequantize(rows, GGMLQuantizationType[kind])
    return values


def _halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """llama.cpp rotates neighbours (2i, 2i+1), Hugging Face (i, i + half): its converter interleaves the two halves of
    each head of q and k (convert_hf_to_gguf.py, LlamaModel.permute). Here they are set apart again."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


class _Cursor:
    """Reads the header's values one after the other. Raises ValueError or struct.error past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.number("<Q")
        if length > len(self.data) - self.at:
            raise ValueError("it ends inside its header")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_scalar(kind))
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            # Each takes 8 bytes at least: a count that cannot be is no reason to loop.
            self._room(count * 8)
            return [self.string() for _ in range(count)]
        form = _scalar(kind)
        size = struct.calcsize(form)
        self._room(count * size)
        values = list(struct.unpack_from(f"<{count}{form[1]}", self.data, self.at))
        self.at += count * size
        return values

    def _room(self, size: int) -> None:
        if size > len(self.data) - self.at:
            raise ValueError("it ends inside its header")


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a value of unknown type {kind}")
    return _SCALARS[kind]


def _parse(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    cursor = _Cursor(data)
    if data[:4] != b"GGUF":
        raise ValueError("it does not begin with 'GGUF'")
    cursor.at = 4
    version = cursor.number("<I")
    if version not in (2, 3):
        raise UnknownArchitecture(f"GGUF version {version} is not read", "read are 2 and 3, little-endian")
    tensor_count, value_count = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("<I"))
    if metadata.get("split.count", 0) > 1:
        raise UnknownArchitecture("a GGUF in several files is not read", "join them with llama-gguf-split --merge")
    found = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = int(metadata.get("general.alignment", 32))
    if alignment < 1:
        raise ValueError(f"an alignment of {alignment}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: _placed(name, shape, kind, start + offset) for name, shape, kind, offset in found}
    if len(tensors) != len(found):
        raise ValueError("two tensors of one name")
    end = max((t.offset + t.bytes for t in tensors.values()), default=start)
    if end > len(data):
        raise ValueError(f"it has {len(data)} bytes, its header promises {end}")
    return metadata, tensors


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.string(), cursor.number("<I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"tensor {name} has {dimensions} dimensions")
    shape = tuple(reversed([cursor.number("<Q") for _ in range(dimensions)]))
    return name, shape, cursor.number("<I"), cursor.number("<Q")


def _placed(name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    if kind not in TYPES:
        names = ", ".join(n for n, _, _ in TYPES.values())
        raise UnknownArchitecture(f"tensor {name} has ggml's type {kind}, which is not read", f"read are {names}")
    type_name, block_items, block_size = TYPES[kind]
    if prod(shape) < 1 or shape[-1] % block_items:
        raise ValueError(f"tensor {name} of shape {list(shape)} cannot be made of {type_name} blocks")
    return GgufTensor(name, shape, type_name, offset, prod(shape) // block_items * block_size)
