"""How weights lie in memory once the compiled CPU kernels have packed them: bytes by kind, and of a whole model.

Owns the arithmetic that a memory plan needs before anything is loaded; engine/kernels/cpp/packed.h owns the layout
itself, and a test holds the two together. No torch. Enter at `resident_bytes`.
"""

from collections.abc import Iterable
from math import prod

from engine.kv.layout import DTYPE_BYTES
from engine.manifest import Manifest
from engine.names import expected

# The order is the number by which the compiled code knows a kind.
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
# ggml's block formats that a prepared model keeps as they are → bytes of one block of 32 in a row.
ROW_BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
BLOCK = 32
_LANES = 16
# Bytes of 16 outputs x 32 inputs: scales (and offsets) as fp16, then the items.
_TILE_BLOCK_BYTES = {
    "F32": 16 * 32 * 4,
    "F16": 16 * 32 * 2,
    "BF16": 16 * 32 * 2,
    "Q8_0": 16 * 2 + 16 * 32,
    "Q4_0": 2 * 16 * 2 + 16 * 32 // 2,
    "Q4_1": 2 * 16 * 2 + 16 * 32 // 2,
}
_OF_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def packed_bytes(kind: str, outputs: int, inputs: int) -> int:
    """Of one weight [outputs, inputs]: whole tiles of 16 x 32."""
    return -(-outputs // _LANES) * -(-inputs // BLOCK) * _TILE_BLOCK_BYTES[kind]


def resident_bytes(manifest: Manifest, dtype: str, packed: bool) -> int:
    """Of a model's weights once loaded. `packed`: by the compiled kernels, which keep what the file has; else all are
    `dtype`, and in float32 tied embeddings are kept twice: as rows, and prepacked as head."""
    shapes = expected(manifest.spec)
    if not packed:
        tied = manifest.spec.tie_embeddings and dtype == "float32"
        twice = prod(shapes["model.embed_tokens.weight"]) if tied else 0
        return (manifest.parameters + twice) * DTYPE_BYTES[dtype]
    total = 0
    for names in _fused(shapes):
        first = shapes[names[0]]
        if len(first) == 1:
            total += sum(prod(shapes[name]) * 4 for name in names)
            continue
        kinds = {manifest.blocks.get(name) or _OF_DTYPE[manifest.weights_dtype] for name in names}
        kind = kinds.pop() if len(kinds) == 1 else "F32"
        total += packed_bytes(kind, sum(shapes[name][0] for name in names), first[1])
    return total


def _fused(names: Iterable[str]) -> list[list[str]]:
    """The tensors that become one product: q, k and v of a layer; gate and up."""
    groups: dict[str, list[str]] = {}
    for name in names:
        key = name
        for part in ("q_proj", "k_proj", "v_proj"):
            key = key.replace(f".{part}.", ".qkv.")
        for part in ("gate_proj", "up_proj"):
            key = key.replace(f".{part}.", ".gate_up.")
        groups.setdefault(key, []).append(name)
    return list(groups.values())
