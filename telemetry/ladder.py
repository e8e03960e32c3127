"""The memory ladder as far as it is known: which owner has how many bytes, so that they sum to the limit.

Owns the arithmetic between what the processes report as booked and measured (or, until one reports, the plan made at
start), the KV pool's use and the limit. It must not measure anything. Enter at `ladder`.

The KV pool counts whole, by what is promised to it and not by the pages that exist now, since nobody else may have it.
Activations are the largest measured peak of the last steps, and until one was measured what the plan keeps for the
largest legal step. On a host, `runtime` is what the engine held before the
first booking, its libraries' file pages, and all of the daemon. `neighbours` is that part of the limit which is neither
ours nor to be had any more, because others hold it.
"""

from dataclasses import dataclass
from typing import Any, Final

from telemetry.events import MemoryReport
from telemetry.state import State

OWNERS: Final = (
    *("weights", "draft", "kv_active", "kv_cached", "kv_free", "activations", "workspace", "graphs"),
    *("unbooked", "allocator_cache", "runtime", "neighbours", "headroom"),
)
# What is really needed now; cached and free KV blocks are reserve, reclaimable at once.
IN_USE: Final = ("weights", "draft", "graphs", "workspace", "activations", "runtime", "unbooked", "kv_active")
_PLANNED: Final = {
    "weights": "weights_bytes",
    "activations": "activation_bytes",
    "workspace": "workspace_bytes",
    "runtime": "runtime_bytes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Bytes by owner on one device. `source` is 'ledger', or 'plan' where only the plan at start is known. If there is
    a limit the owners sum to it; a negative headroom is how far they are beyond it."""

    device: str
    source: str
    owners: dict[str, int]
    limit_bytes: int | None

    @property
    def used_bytes(self) -> int:
        return sum(self.owners.get(owner, 0) for owner in IN_USE)

    @property
    def reserved_bytes(self) -> int:
        return self.used_bytes + self.owners.get("kv_cached", 0) + self.owners.get("kv_free", 0)


def ladder(state: State) -> Ladder | None:
    """What is known of the running engine's memory; None without one."""
    started, report = state.started, state.memory.get("engine")
    resolved: dict[str, Any] = started.resolved if started else {}
    if report is not None:
        device, source, limit = report.device, "ledger", report.limit_bytes
        owners = _measured(report, state.memory.get("daemon"))
        peak = max(state.peaks_bytes, default=0) or resolved.get("activation_bytes", 0)
        owners["activations"] = max(peak, owners.get("activations", 0))
    elif started is not None and state.ended is None and "weights_bytes" in resolved:
        device, source, limit = str(resolved.get("device", "")), "plan", resolved.get("memory_limit_bytes", 0)
        owners = {owner: resolved[field] for owner, field in _PLANNED.items() if field in resolved}
    else:
        return None
    owners |= _pool(state, resolved)
    if limit:
        owners["headroom"] = limit - sum(amount for owner, amount in owners.items() if owner != "headroom")
    return Ladder(device=device, source=source, owners=owners, limit_bytes=limit or None)


def fragmentation(measured: dict[str, int]) -> float | None:
    """The share of what an allocator has reserved that is free, but not in its largest free piece: a step that needs
    much at once cannot have it. None if the allocator gives no figures."""
    reserved, free = measured.get("allocator_reserved", 0), measured.get("allocator_free", 0)
    return (free - min(free, measured.get("allocator_largest_free", 0))) / reserved if reserved else None


def _measured(report: MemoryReport, daemon: MemoryReport | None) -> dict[str, int]:
    """Owners by the engine's report; the daemon's counts if it lives on the same device."""
    measured = report.measured
    owners = {owner: amount for owner, amount in report.booked.items() if owner in OWNERS}
    owners |= {gap: measured[gap] for gap in ("unbooked", "allocator_cache") if gap in measured}
    beside = daemon.measured if daemon is not None and daemon.device == report.device else {}
    files = measured.get("file", 0) - measured.get("weights_mapped", 0) if report.device == "cpu" else 0
    owners["runtime"] = owners.get("runtime", 0) + files + _resident(beside)
    obtainable = _obtainable(report)
    if report.limit_bytes and obtainable is not None:
        ours = measured["device_used"] if "device_used" in measured else _resident(measured) + _resident(beside)
        owners["neighbours"] = max(0, report.limit_bytes - ours - obtainable)
    return owners


def _resident(measured: dict[str, int]) -> int:
    return sum(measured.get(kind, 0) for kind in ("anonymous", "shared", "file"))


def _obtainable(report: MemoryReport) -> int | None:
    """What the device, or on a host the machine and its control group, could still give us; None if nobody says."""
    measured = report.measured
    if "device_free" in measured:
        return measured["device_free"]
    known = [measured["host_available"]] if "host_available" in measured else []
    if "cgroup_limit" in measured and "cgroup_usage" in measured:
        taken = measured["cgroup_usage"] - measured.get("cgroup_cache", 0)
        known.append(max(0, measured["cgroup_limit"] - taken))
    return min(known, default=None)


def _pool(state: State, resolved: dict[str, Any]) -> dict[str, int]:
    """The pool by what its blocks are used for; all of it is free before the first report."""
    block_bytes, blocks = resolved.get("kv_block_bytes"), state.blocks
    if not block_bytes:
        return {}
    if blocks is None:
        return {"kv_free": resolved.get("kv_blocks", 0) * block_bytes}
    return {
        "kv_active": blocks.active * block_bytes,
        "kv_cached": blocks.cached * block_bytes,
        "kv_free": blocks.free * block_bytes,
    }
