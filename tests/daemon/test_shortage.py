"""Memory that cannot be had ends in an incident that says so, wherever it was asked for: in the engine's scheduler, in
one of its commands, in a library that aborts, in the daemon."""

import errno
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from daemon.shortage import Shortage, lacks_memory
from engine import wire
from engine.books import NoBooks
from engine.config import EngineConfig
from engine.loop import Engine
from engine.outbox import Outbox
from engine.output import Output
from engine.request import FinishReason, Request
from engine.scheduler import Scheduler
from engine.server import Server
from telemetry.events import EngineEnded, Event, Incident
from tests.fakes.engine_main import FaultyRunner, fake_resolved, options
from tests.fakes.sessions import read, request, session

pytestmark = pytest.mark.timeout(120)


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["memory_error_at_step", "bad_alloc_at_step"])
async def test_an_engine_that_cannot_go_on_is_told_as_out_of_memory(tmp_path: Path, fault: str) -> None:
    async with session(tmp_path, **{fault: 3}) as running:
        (stream,) = running.session.submit([request("r", 20)])
        outputs = await read(stream, 60)
        assert outputs[-1].finish is FinishReason.ERROR
        await running.until(lambda: bool(running.of(EngineEnded)), 60)
        (ended,) = running.of(EngineEnded)
        assert isinstance(ended, EngineEnded)
        assert ended.cause == "oom"
        await running.until(lambda: bool(running.of(Incident)), 60)
        (incident,) = running.of(Incident)  # one, whoever told it
        assert isinstance(incident, Incident)
        assert incident.kind == "oom"
        await running.until(lambda: running.session.view().state == "ready", 60)


class Wire:
    """A Link that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[wire.Reply] = []

    def send(self, reply: wire.Reply) -> None:
        self.sent.append(reply)

    def ends(self) -> list[Output]:
        replies = [reply for reply in self.sent if isinstance(reply, wire.Outputs)]
        return [output for reply in replies for output in reply.outputs if output.finish is not None]


class Cramped(Scheduler):
    """No memory for newcomers, as often as it is told."""

    refusals = 1

    def add(self, requests: Sequence[Request], now_ns: int) -> list[Output]:
        if self.refusals:
            self.refusals -= 1
            raise MemoryError
        return super().add(requests, now_ns)


def test_a_command_without_memory_refuses_its_choices_and_the_engine_goes_on() -> None:
    resolved, limits = fake_resolved(EngineConfig(model_dir="none"))
    events: list[Event] = []
    link = Wire()
    engine = Engine(Cramped(resolved, limits, cache_root="t"), FaultyRunner(options([])), events.append)
    outbox = Outbox(lambda _: True)
    server = Server(engine, link, outbox, resolved, limits, NoBooks(), events.append)  # type: ignore[arg-type]
    server._receive(wire.encode(wire.Submit(requests=[request("first", 3)])))
    (end,) = link.ends()
    assert (end.request_id, end.error_code) == ("first", "out_of_memory")
    (incident,) = [event for event in events if isinstance(event, Incident)]
    assert (incident.kind, incident.memory is not None) == ("oom", True)
    server._receive(wire.encode(wire.Submit(requests=[request("second", 3)])))
    while engine.has_work:
        server._give(engine.step())
    assert link.ends()[-1].finish is FinishReason.LENGTH


def fail(log: logging.Logger, error: Exception) -> None:
    try:
        raise error
    except Exception:
        log.exception("a handler failed")


def test_the_daemons_own_shortage_is_an_incident_once_a_minute() -> None:
    events: list[Event] = []
    now = [1_000_000_000]
    log = logging.Logger("inferd.api")
    log.addHandler(Shortage(events.append, lambda: now[0]))
    fail(log, ValueError("no memory of this kind"))
    assert events == []
    fail(log, MemoryError())
    fail(log, OSError(errno.ENOMEM, "fork"))
    (incident,) = events
    assert isinstance(incident, Incident)
    assert incident.kind == "oom"
    assert "the daemon could not get memory (inferd.api: a handler failed)" in incident.summary
    assert incident.memory is not None
    now[0] += 61_000_000_000
    fail(log, OSError(errno.ENOMEM, "fork"))
    assert len(events) == 2


def test_what_lacks_memory_may_be_the_cause_of_what_was_raised() -> None:
    error = RuntimeError("no request could be read")
    error.__cause__ = MemoryError()
    assert lacks_memory(error)
    assert not lacks_memory(RuntimeError("memory"))
    assert not lacks_memory(OSError(errno.ENOSPC, "disk"))
