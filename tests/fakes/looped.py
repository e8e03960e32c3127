"""LoopedPort: the real scheduler and engine behind a daemon.port.EnginePort, in the test's own event loop.

Only the process and the sockets are missing: commands and outputs travel by `call_later`. A delay can be planted where
a stage of a request's life is. Enter at `LoopedPort`, used like ScriptedPort.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from daemon.port import OutputStream
from daemon.streams import Stream
from engine.loop import Engine
from engine.output import Output
from engine.plan import StepPlan
from engine.request import Request
from engine.scheduler import Scheduler
from engine.sequence import SequenceView
from telemetry.events import Event, StepReport
from tests.fakes.port import ScriptedPort
from tests.fakes.runner import FakeRunner
from tests.fakes.scheduling import ceilings, widest

SUBJECT_TOKENS = 7  # max_tokens of the request that a planted delay is for


class LoopedPort(ScriptedPort):
    """`plant` maps a stage to seconds that are slept away there once, as soon as the subject is in it. `on_step` is
    called with the live choices before each step is launched."""

    def __init__(self, *, step_s: float = 0.0, rows: int = 8, kv_blocks: int = 256, **limits: int) -> None:
        super().__init__(context=1024)
        resolved = ceilings(rows=rows, kv_blocks=kv_blocks, block_size=4)
        self.plant: dict[str, float] = {}
        self.on_step: Callable[[list[SequenceView]], None] = lambda _: None
        self.limits = widest(resolved, **limits)
        self.steps: list[StepReport] = []
        self._pace_s = step_s
        scheduler = Scheduler(resolved, self.limits, cache_root="t")
        self.engine = Engine(scheduler, _Slow(FakeRunner(4), self._during), self._publish)

    def submit(self, requests: Sequence[Request]) -> list[OutputStream]:
        now_ns = time.monotonic_ns()
        self.seen.requests += requests
        asyncio.get_running_loop().call_later(self.plant.pop("wire_in", 0.0), self._receive, list(requests))
        return [self._table.open(request.id, now_ns) for request in requests]

    def _receive(self, requests: list[Request]) -> None:
        self._deliver(self.engine.submit(requests))
        self._work.set()

    def _deliver(self, outputs: list[Output]) -> None:
        if outputs:
            ends = any(output.finish is not None for output in outputs)
            delay_s = self.plant.pop("wire_out", 0.0) if ends else 0.0
            asyncio.get_running_loop().call_later(delay_s, self._table.deliver, outputs)

    def _acknowledge(self, request_id: str, tokens: int) -> None:
        asyncio.get_running_loop().call_soon(self._obey, lambda: self.engine.ack({request_id: tokens}))

    def _cancel(self, stream: Stream, reason: str) -> None:
        self.seen.cancelled.append((stream.request_id, reason))
        cancel: Callable[[], Any] = lambda: self._deliver(self.engine.cancel([stream.request_id], reason))  # noqa: E731
        asyncio.get_running_loop().call_soon(self._obey, cancel)

    def _obey(self, command: Callable[[], Any]) -> None:
        command()
        self._work.set()

    def _publish(self, event: Event) -> None:
        if isinstance(event, StepReport):
            self.steps.append(event)

    def _during(self) -> float:
        """Seconds that the step about to be launched takes longer."""
        views = self.engine.scheduler.views()
        self.on_step(views)
        subject = next((view.stage for view in views if view.max_tokens == SUBJECT_TOKENS), "")
        return self.plant.pop(subject, 0.0) if subject != "queue" else 0.0

    async def _run(self) -> None:
        while True:
            await self._open.wait()
            if not self.engine.has_work or self.engine.starved:
                self._work.clear()
                await self._work.wait()
                continue  # it may be paused
            await asyncio.sleep(self._pace_s)
            if not self._open.is_set():
                continue  # it was paused meanwhile: what arrives now is to wait
            if delay_s := self.plant.pop("queue", 0.0):
                await asyncio.sleep(delay_s)
            self._deliver(self.engine.step())


class _Slow:
    """A FakeRunner whose launches take longer."""

    depth = 1

    def __init__(self, inner: FakeRunner, longer_s: Callable[[], float]) -> None:
        self._inner = inner
        self._longer_s = longer_s
        self.collect = inner.collect
        self.tell = inner.tell
        self.close = inner.close

    def launch(self, plan: StepPlan) -> None:
        if plan.slices:
            time.sleep(self._longer_s())
        self._inner.launch(plan)
