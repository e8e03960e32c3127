"""The thread settings that an engine process gets before torch is imported. Stdlib only; read by the daemon's session.

OpenMP workers spin at the end of each parallel region by default. On cores that are shared (with the daemon, above all)
a spinning worker keeps the very thread away that it waits for: a step of 16 rows took 20 times as long beside a busy
neighbour. So they sleep at once.
"""


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables for an engine with `threads` compute threads."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
    }
