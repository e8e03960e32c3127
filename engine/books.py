"""Books: the engine process's bytes, booked by their owners and beside them what is measured, as one MemoryReport.

Owns when it is measured and what the figures of one device mean. It must not know tensors (their owner books their
bytes) or the scheduler; what is made of the report is telemetry/ladder.py's. Enter at `Books.report`, between two
steps: what a step needs only while it runs is then not in use.

On a CPU what is booked plus `runtime` explains the anonymous and shared memory of the process, and weights mapped from
a file. KV is booked by the pages of the pool that exist. Steps leave behind what the allocator keeps for the next one:
so much of it as the plan grants to activations is theirs, the rest is `allocator_cache`. What is left is `unbooked`.
(The allocator must not be trimmed: it goes on calling free what it has given back, and nobody could tell.)
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from telemetry import probe, residency
from telemetry.events import MemoryReport
from telemetry.ledger import Ledger

# A measurement that used so much CPU time comes again only after a multiple of it: it costs at most a 500th.
_REST = 500


class Accounts(Protocol):
    """Who can say what the process's memory is used for."""

    def report(self, now_ns: int) -> MemoryReport | None:
        """Booked and measured now; None while it is too early to look again."""


class NoBooks:
    """The plain twin: nothing is known."""

    def report(self, now_ns: int) -> MemoryReport | None:
        return None


class Books:
    """`ledger` has the runtime and the bookings of `device` (cpu | cuda). `pool`: address and length of KV's own
    mapping; without one it was booked. `model_dir`: files mapped from there are weights. `device_memory` measures a
    device that is not the host."""

    def __init__(
        self,
        ledger: Ledger,
        device: str,
        *,
        limit_bytes: int,
        activation_bytes: int,
        pool: tuple[int, int] | None = None,
        model_dir: Path | None = None,
        device_memory: Callable[[], dict[str, int]] | None = None,
        root: Path = probe.ROOT,
        clock: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._ledger = ledger
        self._device = device
        self._limit_bytes = limit_bytes
        self._activation_bytes = activation_bytes
        self._pool = pool
        self._weights_from = model_dir if model_dir and probe.maps_files_under(model_dir, root=root) else None
        self._device_memory = device_memory
        self._root = root
        self._clock = clock
        self._not_before_ns = 0

    def report(self, now_ns: int) -> MemoryReport | None:
        """See Accounts."""
        if now_ns < self._not_before_ns:
            return None
        begun_ns = self._clock()
        booked = self._ledger.owners(self._device)
        measured = self._host()
        if self._device_memory is not None:
            measured |= self._device_memory()
        else:
            self._explain(booked, measured)
        took_ns = self._clock() - begun_ns
        self._not_before_ns = now_ns + _REST * took_ns
        measured["probe_ns"] = took_ns
        return MemoryReport(
            at_ns=now_ns,
            process="engine",
            device=self._device,
            booked=booked,
            measured=measured,
            limit_bytes=self._limit_bytes,
        )

    def _explain(self, booked: dict[str, int], measured: dict[str, int]) -> None:
        """Fill in what the host's process explains: KV by its pages, activations by what the allocator keeps."""
        if self._pool is not None:
            pages = residency.resident_in(*self._pool)
            booked["kv"] = pages if pages is not None else self._pool[1]
        heap = residency.heap()
        if heap is not None:
            booked["activations"] = min(heap.free_bytes, self._activation_bytes)
            measured["allocator_cache"] = heap.free_bytes - booked["activations"]
            measured["allocator_free"] = heap.free_bytes
            measured["allocator_reserved"] = heap.in_use_bytes + heap.free_bytes
            measured["allocator_largest_free"] = heap.top_bytes
        if self._weights_from is not None:
            measured["weights_mapped"] = probe.mapping_bytes(f"{self._weights_from}/", root=self._root) or 0
        if "anonymous" in measured:
            held = measured["anonymous"] + measured["shared"] + measured.get("weights_mapped", 0)
            explained = sum(booked.values()) + measured.get("allocator_cache", 0)
            measured["unbooked"] = max(0, held - explained)

    def _host(self) -> dict[str, int]:
        """The process and the machine around it; what the system does not say is left out."""
        found: dict[str, int | None] = {}
        own, host, group = probe.resident(root=self._root), probe.host_memory(self._root), probe.cgroup(root=self._root)
        if own is not None:
            found |= {"anonymous": own.anonymous_bytes, "shared": own.shared_bytes, "file": own.file_bytes}
        if host is not None:
            found |= {"host_total": host.total_bytes, "host_available": host.available_bytes}
        found |= {"cgroup_limit": group.limit_bytes, "cgroup_usage": group.usage_bytes}
        found["cgroup_cache"] = group.cache_bytes
        return {name: value for name, value in found.items() if value is not None}
