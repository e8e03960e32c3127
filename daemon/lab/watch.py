"""Watches an inferd while it is measured: memory by owner, queue, blocks, rates, limits and decisions over time.

Owns the sampling and the names of the series. It must not know the load or what the series are judged by. Enter at
`Watch` as an async context; afterwards `series`, `marks` and `limit_bytes`. A server that is no inferd of this machine
is not watched, and `why_not` says so.
"""

import asyncio
import time
import urllib.parse
from contextlib import suppress
from typing import Any, Final

import msgspec

from daemon.lab.record import Mark, Series
from telemetry.client import Client, ClientError, Endpoint, find
from telemetry.parts import MemoryView, TotalsView
from telemetry.snapshot import Snapshot

PARTS: Final = ("limits", "queue", "kv", "memory", "totals", "decisions")
_UNITS: Final = {"memory": "bytes", "process": "bytes", "queue": "requests", "kv": "blocks", "rate": "tokens/s"}


class Watch:
    """Samples every `every_s` seconds from its begin to its end. `began_s` is time.perf_counter, which on Linux is the
    clock that the daemon stamps its events with."""

    def __init__(self, endpoint: Endpoint | None, every_s: float = 1.0, why_not: str = "") -> None:
        self.endpoint = endpoint
        self._client = Client(endpoint) if endpoint else None
        self.why_not = why_not
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None
        self._rows: list[tuple[float, dict[str, float | None]]] = []
        self._decisions: dict[int, Mark] = {}
        self._before: tuple[int, TotalsView] | None = None
        self.first: Snapshot | None = None
        self.last: Snapshot | None = None
        self.began_s = 0.0
        self.limit_bytes: int | None = None
        self.missed = 0  # samples that nobody answered in time

    async def __aenter__(self) -> "Watch":
        self.began_s = time.perf_counter()
        if self._client:
            await self._sample()
            self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            await self._sample()

    @property
    def settings(self) -> dict[str, Any]:
        """What the server was asked for, by its snapshot; secrets are not in it."""
        config = (self.first.config if self.first else None) or {}
        return {name: entry["value"] if isinstance(entry, dict) else entry for name, entry in config.items()}

    @property
    def versions(self) -> dict[str, str]:
        return dict((self.first.versions if self.first else None) or {})

    @property
    def series(self) -> tuple[Series, ...]:
        """Every figure that was reported at least once."""
        names = dict.fromkeys(name for _, row in self._rows for name, value in row.items() if value is not None)
        at_s = tuple(round(at, 3) for at, _ in self._rows)
        return tuple(
            Series(
                name=name,
                unit=_UNITS.get(name.partition(".")[0], "count"),
                at_s=at_s,
                values=tuple(row.get(name) for _, row in self._rows),
            )
            for name in names
        )

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The tuner's decisions in the time watched."""
        return tuple(mark for mark in self._decisions.values() if mark.at_s >= 0)

    def used_share(self) -> float | None:
        """Memory in use now as a share of the limit."""
        memory = self.last.memory if self.last else None
        if memory is None or not memory.limit_bytes or memory.used_bytes is None:
            return None
        return memory.used_bytes / memory.limit_bytes

    async def _run(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + self._every_s, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
            await self._sample()

    async def _sample(self) -> None:
        assert self._client is not None
        parts = PARTS if self.first else (*PARTS, "versions", "config", "ceilings")
        try:
            found = await asyncio.to_thread(self._client.snapshot, parts, False)
        except ClientError as error:
            self.missed += 1
            self.why_not = self.why_not or str(error)
            return
        self.first, self.last = self.first or found, found
        at_s = found.at_ns / 1e9 - self.began_s
        self._rows.append((at_s, self._figures(found)))
        for decision in found.decisions or ():
            change = f"{decision.knob} {decision.before} → {decision.after}"
            others = "".join(f", {name} → {value}" for name, value in decision.also.items())
            self._decisions[decision.number] = Mark(
                at_s=round(decision.at_ns / 1e9 - self.began_s, 3),
                label=f"{decision.rule}: {change}{others}",
                detail=". ".join(text for text in (decision.why, decision.verdict) if text),
            )

    def _figures(self, found: Snapshot) -> dict[str, float | None]:
        row: dict[str, float | None] = {}
        if found.memory:
            row |= self._memory(found.memory)
        if found.queue:
            row |= {f"queue.{name}": getattr(found.queue, name) for name in ("running", "waiting", "preempted")}
        if found.kv:
            row |= {f"kv.{name}": getattr(found.kv, name) for name in ("active", "cached", "free")}
        if found.limits:
            row |= {f"limits.{name}": value for name, value in msgspec.structs.asdict(found.limits).items()}
        if found.totals:
            row |= self._rates(found.at_ns, found.totals)
        return row

    def _memory(self, memory: MemoryView) -> dict[str, float | None]:
        self.limit_bytes = memory.limit_bytes or self.limit_bytes
        row: dict[str, float | None] = {f"memory.{owner}": amount for owner, amount in (memory.owners or {}).items()}
        row["memory.in use"] = memory.used_bytes
        row["process.engine"] = memory.engine_resident_bytes
        row["process.daemon"] = memory.daemon_resident_bytes
        return row

    def _rates(self, at_ns: int, totals: TotalsView) -> dict[str, float | None]:
        """By granted tokens, so that a long answer counts while it is written and not when it ends."""
        before, self._before = self._before, (at_ns, totals)
        if before is None or at_ns <= before[0] or totals.step_tokens is None:
            return {}
        seconds = (at_ns - before[0]) / 1e9
        was = before[1].step_tokens or {}
        return {
            f"rate.{kind}": round((totals.step_tokens.get(kind, 0) - was.get(kind, 0)) / seconds, 2)
            for kind in ("decode", "prefill", "recompute")
        }


def beside(url: str, socket: str = "", every_s: float = 1.0) -> Watch:
    """A watch of the inferd that serves `url`: the one at `socket`, else the one that runs here, if its port is that of
    the URL. One that watches nothing, and says why, where there is none."""
    try:
        endpoint = find(socket)
        config = Client(endpoint).snapshot(["config"]).config or {}
    except ClientError as error:
        return Watch(None, why_not=f"no figures from the server's side: {error}")
    port = config.get("port", {}).get("value")
    if not socket and port != urllib.parse.urlsplit(url).port:
        return Watch(None, why_not=f"no figures from the server's side: {url} is not the inferd at {endpoint}")
    return Watch(endpoint, every_s)
