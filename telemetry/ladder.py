"""The memory ladder as far as it is known: which owner has how many bytes, so that they sum to the limit.

Owns the arithmetic between the ledger's bookings (or, until one reports, the plan made at start), the KV pool's use
and the limit. It must not measure anything. Enter at `ladder`.
"""

from dataclasses import dataclass
from typing import Any, Final

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
    a limit the owners sum to it; a negative headroom is how far the plan is beyond it."""

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
        owners = {owner: amount for owner, amount in report.booked.items() if owner in OWNERS}
    elif started is not None and state.ended is None and "weights_bytes" in resolved:
        device, source, limit = str(resolved.get("device", "")), "plan", resolved.get("memory_limit_bytes", 0)
        owners = {owner: resolved[field] for owner, field in _PLANNED.items() if field in resolved}
    else:
        return None
    owners |= _pool(state, resolved)
    if limit:
        owners["headroom"] = limit - sum(amount for owner, amount in owners.items() if owner != "headroom")
    return Ladder(device=device, source=source, owners=owners, limit_bytes=limit or None)


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
