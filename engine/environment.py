"""The environment that an engine process gets before torch is imported. Stdlib only; read by the daemon's session.

OpenMP workers spin at the end of each parallel region by default. On cores that are shared (with the daemon, above all)
a spinning worker keeps the very thread away that it waits for: a step of 16 rows took 20 times as long beside a busy
neighbour. So they sleep at once.

oneDNN, and torch before it, keep what they compiled for each shape of a product, 1,024 shapes by default, half a
megabyte each. Rows and contexts differ from step to step, so that under load an engine without compiled kernels grew by
600 MB that no plan knew of. With a quarter of them it stays at 130, and is no slower.
"""

# A step of 60 rows attends to as many lengths, twice: with 32, each was compiled again in each layer.
_KEPT_SHAPES = 256


def environment(threads: int) -> dict[str, str]:
    """Environment variables for an engine with `threads` compute threads; those that the user set come first."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(_KEPT_SHAPES),
        "LRU_CACHE_CAPACITY": str(_KEPT_SHAPES),  # torch's own, of the same
    }
