"""GGUF files: header, tensors, and their conversion into safetensors under Hugging Face names.

Dear (seconds), so it is done once, in `python -m engine.prepare`. Tensors are dequantized one at a time: memory stays
small. Owns names, shapes and the undoing of llama.cpp's row permutation of q and k. Source of the format: the GGUF
specification of ggml. Enter at `GGUF`.
"""

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.errors import CorruptModel
from engine.modelspec import ModelSpec, from_gguf_metadata

Progress = Callable[[str, float], None]
READ_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUF:
    """One file, its header read. Raises CorruptModel if it is not whole, or has tensors of a type not read yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CorruptModel(f"{path} is not a GGUF file", "is the download complete?")
        try:
            reader = gguf.GGUFReader(path)
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, struct.error) as error:
            raise CorruptModel(f"{path} is damaged or cut off: {error}", "download it again") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        for tensor in reader.tensors:
            if tensor.data_offset + tensor.n_bytes > size:
                raise CorruptModel(
                    f"{path} is cut off: {tensor.name} ends beyond its {size} bytes", "download it again"
                )
        strange = sorted({t.tensor_type.name for t in reader.tensors} - set(READ_TYPES))
        if strange:
            raise CorruptModel(f"{path} has tensors of type {', '.join(strange)}", f"read are {', '.join(READ_TYPES)}")

    def spec(self) -> ModelSpec:
        """Raises UnknownArchitecture, CorruptModel."""
        factors = self._tensors.get(_ROPE_FACTORS)
        return from_gguf_metadata(
            self.metadata,
            tied="output.weight" not in self._tensors,
            out_bias="blk.0.attn_output.bias" in self._tensors,
            rope_factors=tuple(float(value) for value in self._values(factors)) if factors is not None else (),
        )

    @property
    def parameters(self) -> int:
        return sum(int(tensor.n_elements) for tensor in self._tensors.values())

    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes in the file by tensor type."""
        counts: Counter[str] = Counter()
        for tensor in self._tensors.values():
            counts[tensor.tensor_type.name] += int(tensor.n_bytes)
        return dict(counts)

    def digest(self) -> str:
        """sha256 of the file's content."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def write_safetensors(self, target: Path, progress: Progress) -> int:
        """All tensors as `target`, halves as they are, the rest in fp32; returns its bytes. The format is eight bytes
        of header length, a JSON header, then the tensors: written piece by piece, never as a whole in memory."""
        spec = self.spec()
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        order = [(name, ours) for name in self._tensors if (ours := hugging_face_name(name)) is not None]
        for name, ours in order:
            tensor = self._tensors[name]
            kind, width = _stored_as(tensor)
            length = int(tensor.n_elements) * width
            shape = [int(n) for n in reversed(tensor.shape.tolist())]
            header[ours] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + length]}
            end += length
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        with target.open("wb") as file:
            file.write(struct.pack("<Q", len(encoded)))
            file.write(encoded)
            for index, (name, _) in enumerate(order):
                for piece in self._bytes(name, spec):
                    file.write(piece)
                progress("weights", (index + 1) / len(order))
        return 8 + len(encoded) + end

    def _bytes(self, name: str, spec: ModelSpec) -> Iterator[Any]:
        tensor = self._tensors[name]
        if tensor.tensor_type.name == "BF16":  # numpy has no such type: rows are moved as pairs of bytes
            values = np.asarray(tensor.data).view(np.uint16).reshape(tuple(reversed(tensor.shape.tolist())))
        elif tensor.tensor_type.name == "F16":
            values = np.asarray(tensor.data)
        else:
            values = self._values(tensor)
        if self.metadata["general.architecture"] == "llama":
            values = _unpermuted(name, values, spec)
        yield np.ascontiguousarray(values).data

    def _values(self, tensor: Any) -> Any:
        """[rows, columns] fp32."""
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        return values.reshape(tuple(reversed(tensor.shape.tolist())))


def hugging_face_name(name: str) -> str | None:
    """The name that our families ask for; None for what they do not (rotary tables). Raises CorruptModel."""
    if name in _TOP:
        return _TOP[name]
    if name == _ROPE_FACTORS:
        return None
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    raise CorruptModel(f"the GGUF has a tensor that no served family knows: {name}")


def _stored_as(tensor: Any) -> tuple[str, int]:
    return {"F16": ("F16", 2), "BF16": ("BF16", 2)}.get(tensor.tensor_type.name, ("F32", 4))


def _unpermuted(name: str, values: Any, spec: ModelSpec) -> Any:
    """llama.cpp interleaves the two rotary halves of each q and k head; Hugging Face keeps them apart."""
    part = name.split(".")[2] if name.startswith("blk.") else ""
    heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}.get(part)
    if heads is None:
        return values
    rest = values.shape[1:]
    return values.reshape(heads, -1, 2, *rest).swapaxes(1, 2).reshape(values.shape)
