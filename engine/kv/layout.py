"""How many bytes a KV block takes and how many blocks a context needs. Arithmetic only; stdlib only."""

from engine.modelspec import ModelSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def block_bytes(spec: ModelSpec, block_size: int, kv_dtype: str) -> int:
    """Bytes of one block over all layers, keys and values."""
    return block_size * spec.kv_bytes_per_token(DTYPE_BYTES[kv_dtype])


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that `tokens` positions need."""
    return -(-tokens // block_size)


def rows_bytes(rows: int, context: int, block_size: int) -> int:
    """Tokens and block tables of the device's rows: engine/device/rows.py."""
    return rows * 8 * (context + 1 + blocks_for(context + 1, block_size))


def rope_bytes(spec: ModelSpec, context: int, dtype: str) -> int:
    """Cosine and sine of every position: engine/layers/rotary.py."""
    return 2 * (context + 1) * spec.head_dim * DTYPE_BYTES[dtype]
