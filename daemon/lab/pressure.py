"""So many requests under way at any moment, and more of them when it is asked for: the load of a soak.

Owns the workers. It must not know HTTP, phases or figures. Enter at `Pressure` as an async context; leaving it cuts off
what is under way.
"""

import asyncio
import itertools
import time
from types import TracebackType

from daemon.load.client import Sample
from daemon.load.drive import Ask
from daemon.load.workload import Workload


class Pressure:
    """`samples` are those of requests that ended, in that order."""

    def __init__(self, requests: Workload, ask: Ask) -> None:
        self.requests = requests
        self.samples: list[Sample] = []
        self.running = 0
        self._ask = ask
        self._indices = itertools.count()
        self._workers: list[asyncio.Task[None]] = []

    @property
    def concurrency(self) -> int:
        return len(self._workers)

    def raise_to(self, concurrency: int) -> None:
        """From now on so many at a time; it never falls."""
        while len(self._workers) < concurrency:
            self._workers.append(asyncio.create_task(self._work()))

    @property
    def failed(self) -> int:
        return sum(bool(sample.error) for sample in self.samples)

    async def __aenter__(self) -> "Pressure":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.cancel()
        ended = await asyncio.gather(*self._workers, return_exceptions=True)
        for outcome in ended:
            if isinstance(outcome, Exception):  # a bug of ours: servers' faults are samples
                raise outcome

    async def _work(self) -> None:
        while True:
            self.running += 1
            try:
                sample = await self._ask(self.requests.request(next(self._indices)), time.perf_counter())
            finally:
                self.running -= 1
            self.samples.append(sample)
            if sample.error:
                await asyncio.sleep(0.2)  # a server that refuses is not hammered
