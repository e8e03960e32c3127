"""The thread settings that an engine process gets before torch is imported. Stdlib only; read by the daemon's session.

OpenMP workers spin after each parallel region by default. On few cores that starves the daemon (and the engine's own
Python thread), so they spin only for the moment between two operators and then sleep.
"""

SPIN_COUNT = 20_000  # GNU OpenMP: iterations of a busy wait, about the gap between two operators of one layer


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables for an engine with `threads` compute threads."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": str(SPIN_COUNT),
        "KMP_BLOCKTIME": "0",
    }
