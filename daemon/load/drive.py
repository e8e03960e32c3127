"""Sends traffic: so many at a time (closed loop), or as they arrive (open loop), and can be stopped at any moment.

Owns the moment of sending; what is due when is the traffic's. It must not know HTTP or figures. Enter at `Drive.send`;
a stopped drive still has every sample so far, and those of the requests that were under way.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from autotune.workload import Job, Traffic, synthetic
from daemon.load.client import Sample
from daemon.load.workload import LoadRequest, Workload

Ask = Callable[[LoadRequest, float], Awaitable[Sample]]
_TICK_S = 0.05


@dataclass(slots=True)
class Drive:
    """One run. `lag_s` is how late this process's own event loop woke up: a high one means that the client, not the
    server, was the bottleneck."""

    workload: Workload
    ask: Ask
    samples: list[Sample] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)
    running: int = 0
    unfinished: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _enough: bool = False

    def stop(self) -> None:
        """End now: nothing more is sent, what runs is cut off."""
        self._stop.set()

    def finish(self) -> None:
        """Send nothing more, and end with the last answer to what was sent."""
        self._enough = True

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    async def closed(self, concurrency: int, requests: int) -> None:
        """`requests` of the workload's mix in all, `concurrency` of them at any moment."""
        users = min(concurrency, requests)
        await self.send(synthetic(self.workload.mix, seed=self.workload.seed, users=users), requests)

    async def send(self, traffic: Traffic, most: int | None = None) -> None:
        """Every job when it is due, however many are under way, and what follows its end; `most` requests at most."""
        began_s = time.perf_counter()
        left = iter(range(most)) if most is not None else itertools.count()

        async def chain(job: Job | None) -> None:
            while job is not None and next(left, None) is not None:
                due_s = began_s + job.at_s
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                if self._enough:
                    return
                await self._one(job, due_s)
                job = traffic.after(job, time.perf_counter() - began_s)

        async def arrivals() -> None:
            async with asyncio.TaskGroup() as group:
                for job in traffic.arrivals():
                    await asyncio.sleep(max(0.0, began_s + job.at_s - time.perf_counter()))
                    if self._enough:
                        return
                    group.create_task(chain(job))

        await self._until_done(arrivals())

    async def _one(self, job: Job, due_s: float) -> None:
        self.running += 1
        try:
            self.samples.append(await self.ask(self.workload.of(job), due_s))
        except asyncio.CancelledError:
            self.unfinished += 1
            raise
        finally:
            self.running -= 1

    async def _until_done(self, work: Coroutine[Any, Any, None]) -> None:
        self.began_s = time.perf_counter()
        sending: asyncio.Future[Any] = asyncio.ensure_future(work)
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
                raise outcome.exceptions[0] if isinstance(outcome, ExceptionGroup) else outcome

    async def _watch_lag(self) -> None:
        while True:
            due = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.lag_s.append(max(0.0, time.perf_counter() - due))
