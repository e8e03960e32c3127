"""An engine and a machine for the simulator: about a small model on two cores, with memory that binds."""

from autotune.space import Space
from engine.budget import Limits, Resolved
from engine.stepcost import StepCost
from tests.fakes.scheduling import ceilings, widest

MIB = 1 << 20
COST = StepCost(fixed_s=0.02, prefill_s=0.0009, row_s=0.0015, context_s=1e-6, crowd_s=1e-5)

SLOW = StepCost(fixed_s=0.06, prefill_s=0.0027, row_s=0.0045, context_s=3e-6, crowd_s=3e-5)  # a third of the speed


def engine(**changes: int | bool) -> Resolved:
    """64 rows, 512 tokens a step; 413 of 1,140 blocks below the watermark, 850 below the hard line."""
    facts: dict[str, int | bool] = {
        "rows": 64,
        "kv_blocks": 1140,
        "block_size": 16,
        "step_tokens": 512,
        "max_model_len": 8192,
        "memory_limit_bytes": 2048 * MIB,
        "weights_bytes": 621 * MIB,
        "activation_bytes": 177 * MIB,
        "runtime_bytes": 345 * MIB,
        "kv_block_bytes": 737280,
        "prefix_cache": False,
        **changes,
    }
    return ceilings(**facts)


def begins(resolved: Resolved, **changes: int) -> Limits:
    """The limits that a daemon starts this engine with, except for `changes`."""
    return Space.of(resolved).start(widest(resolved, **{"prefill_chunk": 64, **changes}))
