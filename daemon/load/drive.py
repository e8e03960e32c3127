"""Sends a workload: so many at a time (closed loop), or as they arrive (open loop), and can be stopped at any moment.

Owns the order and the moment of sending. It must not know HTTP or figures. Enter at `Drive.closed` or `Drive.open`; a
stopped drive still has every sample so far, and those of the requests that were under way.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from daemon.load.client import Sample
from daemon.load.workload import LoadRequest

Ask = Callable[[LoadRequest, float], Awaitable[Sample]]
_TICK_S = 0.05


class Requests(Protocol):
    """Where requests come from, by index."""

    def request(self, index: int) -> LoadRequest: ...


@dataclass(slots=True)
class Drive:
    """One run. `lag_s` is how late this process's own event loop woke up: a high one means that the client, not the
    server, was the bottleneck."""

    workload: Requests
    ask: Ask
    samples: list[Sample] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)
    running: int = 0
    unfinished: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """End now: nothing more is sent, what runs is cut off."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    async def closed(self, concurrency: int, requests: int) -> None:
        """`requests` in all, `concurrency` of them at any moment."""
        indices = iter(range(requests))

        async def worker() -> None:
            for index in indices:
                await self._one(index, time.perf_counter())

        await self._until_done([worker() for _ in range(min(concurrency, requests))])

    async def open(self, offsets_s: Iterator[float]) -> None:
        """One request at each offset, however many are under way."""
        began = time.perf_counter()

        async def arrivals() -> None:
            async with asyncio.TaskGroup() as group:
                for index, offset in enumerate(offsets_s):
                    await asyncio.sleep(max(0.0, began + offset - time.perf_counter()))
                    group.create_task(self._one(index, began + offset))

        await self._until_done([arrivals()])

    async def _one(self, index: int, due_s: float) -> None:
        self.running += 1
        try:
            self.samples.append(await self.ask(self.workload.request(index), due_s))
        except asyncio.CancelledError:
            self.unfinished += 1
            raise
        finally:
            self.running -= 1

    async def _until_done(self, work: list[Coroutine[Any, Any, None]]) -> None:
        self.began_s = time.perf_counter()
        sending: asyncio.Future[Any] = asyncio.gather(*work)
        stop: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        watch = asyncio.ensure_future(self._watch_lag())
        try:
            await asyncio.wait([sending, stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.ended_s = time.perf_counter()
            for task in (sending, stop, watch):
                task.cancel()
            outcomes = await asyncio.gather(sending, stop, watch, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):  # a bug of ours: servers' faults are samples
                raise outcome

    async def _watch_lag(self) -> None:
        while True:
            due = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.lag_s.append(max(0.0, time.perf_counter() - due))
