"""Rows about memory: who has what, and the limit it counts against."""

from telemetry.evidence import OOM_CAUSES
from telemetry.ladder import OWNERS, ladder
from telemetry.metric import OPEN, Metric, Reading, View, each


def _owners(view: View) -> list[Reading]:
    known = ladder(view.state)
    return [((known.device, owner), amount) for owner, amount in known.owners.items()] if known else []


def _limit(view: View) -> list[Reading]:
    known = ladder(view.state)
    return [((known.device,), known.limit_bytes)] if known and known.limit_bytes else []


def _used(view: View) -> list[Reading]:
    known = ladder(view.state)
    return [((known.device,), known.used_bytes / known.limit_bytes)] if known and known.limit_bytes else []


def _reserved(view: View) -> list[Reading]:
    known = ladder(view.state)
    return [((known.device,), known.reserved_bytes / known.limit_bytes)] if known and known.limit_bytes else []


def _watermark(view: View) -> list[Reading]:
    """In use when as many KV blocks are active as the limits allow: from there on newcomers wait or somebody is
    preempted."""
    known, limits, started = ladder(view.state), view.state.limits, view.state.started
    block_bytes = started.resolved.get("kv_block_bytes") if started else None
    if known is None or not known.limit_bytes or limits is None or not block_bytes:
        return []
    at_most = known.used_bytes - known.owners.get("kv_active", 0) + limits.kv_blocks * block_bytes
    return [((known.device,), at_most / known.limit_bytes)]


def _pressure(view: View) -> list[Reading]:
    some_full = view.outside.pressure_us
    return each({"some": some_full[0] / 1e6, "full": some_full[1] / 1e6}) if some_full else []


ROWS = (
    Metric(
        "inferd_memory_bytes",
        "gauge",
        "Bytes by device and owner; they sum to the limit. What no ledger has booked yet is as planned at start.",
        _owners,
        {"device": OPEN, "owner": OWNERS},
    ),
    Metric("inferd_memory_limit_bytes", "gauge", "What the owners' bytes count against.", _limit, {"device": OPEN}),
    Metric(
        "inferd_memory_used_ratio",
        "gauge",
        "weights + draft + graphs + workspace + activations + runtime + unbooked + kv_active / limit.",
        _used,
        {"device": OPEN},
    ),
    Metric(
        "inferd_memory_reserved_ratio",
        "gauge",
        "The used bytes and the KV reserve / limit.",
        _reserved,
        {"device": OPEN},
    ),
    Metric(
        "inferd_memory_watermark_ratio",
        "gauge",
        "Where admission begins to hold back: the used ratio once every KV block that the limits allow is active.",
        _watermark,
        {"device": OPEN},
    ),
    Metric(
        "inferd_memory_pressure_seconds",
        "counter",
        "Time stalled for memory (PSI), where the kernel tells.",
        _pressure,
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
