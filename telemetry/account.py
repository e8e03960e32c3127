"""Account: all that can be said about memory at one instant, for somebody who asks: POST /inferd/v1/memory/snapshot.

Owns what is in it and in which order of size. It must not measure: the fold knows the ladder and the books, the engine
is asked for its blocks, its choices and its mappings. Enter at `account`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from telemetry import events
from telemetry.ladder import fragmentation
from telemetry.parts import KvView, MemoryView, Part
from telemetry.snapshot import Snapshot

PARTS: Final = ("memory", "kv", "requests")  # of a snapshot that an account is made from
_HOLDERS = 16


class Allocator(Part, frozen=True, kw_only=True):
    """The engine's own allocator, in bytes. `fragmentation_ratio`: free, but not in one piece, of what it has."""

    reserved_bytes: int | None = None
    free_bytes: int | None = None
    largest_free_bytes: int | None = None
    fragmentation_ratio: float | None = None


class MemoryAccount(Part, frozen=True, kw_only=True):
    """`owners`: the ladder, largest first. `holders`: the live choices by the KV blocks they hold. `mappings`: the
    engine's address space by name; `segments`: of a CUDA device, as torch has them. None is 'not reported'."""

    at_ns: int
    unix_seconds: float
    limit_bytes: int | None = None
    owners: list[tuple[str, int]] | None = None
    allocator: Allocator | None = None
    holders: list[events.RequestView] | None = None
    mappings: dict[str, int] | None = None
    segments: list[dict[str, Any]] | None = None
    memory: MemoryView | None = None
    kv: KvView | None = None


def account(snapshot: Snapshot, engine: Mapping[str, Any] | None) -> MemoryAccount:
    """`snapshot` has PARTS; `engine` is its answer to 'memory', if there was one."""
    memory, told = snapshot.memory, engine or {}
    live = snapshot.requests.live if snapshot.requests else None
    return MemoryAccount(
        at_ns=snapshot.at_ns,
        unix_seconds=snapshot.unix_seconds,
        limit_bytes=memory.limit_bytes if memory else None,
        owners=_sorted(memory.owners) if memory and memory.owners else None,
        allocator=_allocator(memory.measured) if memory and memory.measured else None,
        holders=_holders(live) if live is not None else None,
        mappings=dict(_sorted(told["mappings"])) if told.get("mappings") else None,
        segments=told.get("segments"),
        memory=memory,
        kv=snapshot.kv,
    )


def encode(made: MemoryAccount) -> bytes:
    """JSON; bytes are base64."""
    return msgspec.json.encode(made)


def _sorted(amounts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(amounts.items(), key=lambda item: -item[1])


def _holders(live: Sequence[events.RequestView]) -> list[events.RequestView]:
    return sorted((view for view in live if view.blocks), key=lambda view: -(view.blocks or 0))[:_HOLDERS]


def _allocator(measured: Mapping[str, Mapping[str, int]]) -> Allocator:
    found = dict(measured.get("engine", {}))
    return Allocator(
        reserved_bytes=found.get("allocator_reserved"),
        free_bytes=found.get("allocator_free"),
        largest_free_bytes=found.get("allocator_largest_free"),
        fragmentation_ratio=fragmentation(found),
    )
