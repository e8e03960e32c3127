"""Rows about memory: who has booked what, and the limit it counts against."""

from telemetry.events import OOM_CAUSES
from telemetry.metric import OPEN, Metric, Reading, View, each, unowned

OWNERS = (
    *("weights", "draft", "kv_active", "kv_cached", "kv_free", "activations", "workspace", "graphs"),
    *("unbooked", "allocator_cache", "runtime", "neighbours", "headroom"),
)


def _owners(view: View) -> list[Reading]:
    """What the engine's ledger booked under these names, the pool split by what its blocks are used for."""
    report, started, blocks = view.state.memory.get("engine"), view.state.started, view.state.blocks
    if report is None:
        return []
    booked = {owner: amount for owner, amount in report.booked.items() if owner in OWNERS}
    block_bytes = started.resolved.get("kv_block_bytes") if started else None
    if blocks is not None and block_bytes:
        booked["kv_active"] = blocks.active * block_bytes
        booked["kv_cached"] = blocks.cached * block_bytes
        booked["kv_free"] = blocks.free * block_bytes
    return [((report.device, owner), amount) for owner, amount in booked.items()]


def _limit(view: View) -> list[Reading]:
    report = view.state.memory.get("engine")
    return [((report.device,), report.limit_bytes)] if report and report.limit_bytes else []


ROWS = (
    Metric(
        "inferd_memory_bytes",
        "gauge",
        "Bytes by device and owner.",
        _owners,
        {"device": OPEN, "owner": OWNERS},
    ),
    Metric("inferd_memory_limit_bytes", "gauge", "What the owners' bytes count against.", _limit, {"device": OPEN}),
    Metric(
        "inferd_memory_used_ratio",
        "gauge",
        "weights + draft + graphs + workspace + activations + runtime + unbooked + kv_active / limit.",
        unowned,
        {"device": OPEN},
    ),
    Metric("inferd_memory_reserved_ratio", "gauge", "Reserved bytes / limit.", unowned, {"device": OPEN}),
    Metric("inferd_memory_watermark_ratio", "gauge", "Where admission begins to hold back.", unowned, {"device": OPEN}),
    Metric(
        "inferd_memory_pressure_seconds",
        "counter",
        "Time stalled for memory (PSI), where the kernel tells.",
        unowned,
        {"kind": ("some", "full")},
    ),
    Metric(
        "inferd_oom",
        "counter",
        "Out-of-memory incidents by cause.",
        lambda view: each(view.state.ooms),
        {"cause": OOM_CAUSES},
    ),
)
