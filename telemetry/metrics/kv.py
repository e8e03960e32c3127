"""Rows about the KV cache: blocks, waste, reuse, and work lost to preemption."""

from telemetry import buckets
from telemetry.events import PREEMPTION_CAUSES
from telemetry.ladder import fragmentation
from telemetry.metric import Metric, Reading, View, each, one


def _blocks(view: View) -> list[Reading]:
    blocks = view.state.blocks
    return each({"active": blocks.active, "cached": blocks.cached, "free": blocks.free}) if blocks else []


def _fragmentation(view: View) -> list[Reading]:
    blocks, started = view.state.blocks, view.state.started
    block_size = started.resolved.get("block_size") if started else None
    if blocks is None or not blocks.total or not block_size:
        return []
    slots = blocks.active * block_size
    known = {"tail": blocks.tail_slots / slots if slots else 0.0, "stranded": blocks.stranded / blocks.total}
    report = view.state.memory.get("engine")
    pieces = fragmentation(report.measured) if report else None
    return each(known if pieces is None else {**known, "allocator": pieces})


def _ages(view: View, kind: str) -> list[Reading]:
    return one(view.state.block_ages[kind])


ROWS = (
    Metric(
        "inferd_kv_blocks",
        "gauge",
        "KV blocks: held by a sequence, kept for reuse, free.",
        _blocks,
        {"state": ("active", "cached", "free")},
    ),
    Metric(
        "inferd_kv_fragmentation_ratio",
        "gauge",
        "tail: empty slots of last blocks / active slots. stranded: blocks of sequences that do not run, and free "
        "ones that the head of the queue cannot use / all. allocator: reserved, free, but not in its largest piece.",
        _fragmentation,
        {"kind": ("tail", "stranded", "allocator")},
    ),
    Metric(
        "inferd_kv_block_lifetime_seconds",
        "histogram",
        "From a block's allocation until it is free again (sampled).",
        lambda view: _ages(view, "lifetime"),
        buckets=buckets.BLOCK_AGE,
    ),
    Metric(
        "inferd_kv_block_idle_before_evict_seconds",
        "histogram",
        "How long an evicted block had not been used (sampled).",
        lambda view: _ages(view, "idle_before_evict"),
        buckets=buckets.BLOCK_AGE,
    ),
    Metric(
        "inferd_kv_block_reuse_gap_seconds",
        "histogram",
        "Between two uses of a cached block (sampled).",
        lambda view: _ages(view, "reuse_gap"),
        buckets=buckets.BLOCK_AGE,
    ),
    Metric(
        "inferd_preemptions",
        "counter",
        "Choices that lost their blocks and had to be computed again.",
        lambda view: each(view.state.preemptions),
        {"cause": PREEMPTION_CAUSES},
    ),
    Metric(
        "inferd_preempted_tokens",
        "counter",
        "Computed positions lost to preemption.",
        lambda view: each(view.state.preempted_tokens),
        {"cause": PREEMPTION_CAUSES},
    ),
    Metric(
        "inferd_prefix_cache_tokens",
        "counter",
        "Prompt tokens at first admission: found in the cache, not found, or matching less than a block.",
        lambda view: each(view.state.prefix),
        {"outcome": ("hit", "miss", "too_short")},
    ),
)
