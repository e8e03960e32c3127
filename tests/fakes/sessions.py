"""Helpers for tests that run a real engine process behind a session."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from daemon.port import OutputStream
from daemon.session import EngineSession
from engine.config import EngineConfig
from engine.output import Output
from engine.request import Request, SamplingParams
from telemetry.events import Event
from tests.fakes.engine_main import argv as fake_argv


@dataclass
class Running:
    """A started session and everything it published."""

    session: EngineSession
    events: list[Event] = field(default_factory=list)

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, true: Callable[[], bool], seconds: float = 60.0) -> None:
        """Until the condition holds; fails the test if it does not in time."""
        async with asyncio.timeout(seconds):
            while not true():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def session(
    directory: Path,
    *,
    config: EngineConfig | None = None,
    wait: bool = True,
    argv: Sequence[str] = (),
    real: bool = False,
    seconds: float = 60.0,
    progress_deadline_s: float = 60.0,
    **faults: object,
) -> AsyncIterator[Running]:
    """A session over a fake engine (`argv`: another; `real`: the real one), ended at the end whatever happens."""
    events: list[Event] = []
    made = EngineSession(
        config or EngineConfig(model_dir="none"),
        directory,
        events.append,
        argv=None if real else argv or fake_argv(**faults),  # type: ignore[arg-type]
        backoff_s=(0.05, 0.1),
        progress_deadline_s=progress_deadline_s,
    )
    await made.start()
    try:
        if wait:
            async with asyncio.timeout(seconds):
                await made.wait_ready()
        yield Running(made, events)
    finally:
        async with asyncio.timeout(60):
            await made.drain(0.0)


def request(request_id: str, max_tokens: int = 8, prompt: Sequence[int] = (1, 2, 3), **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(id=request_id, prompt=tuple(prompt), sampling=sampling, **fields)  # type: ignore[arg-type]


async def read(stream: OutputStream, seconds: float = 60.0) -> list[Output]:
    """Every output of one choice."""
    async with asyncio.timeout(seconds):
        return [output async for output in stream]
