"""Liveness that means progress: what is slow but moves is left alone, what is stuck is reported, then ended."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from daemon.lifecycle import Lifecycle
from daemon.watchdog import Watchdog, own_stacks
from engine.pulse import Beat, Pulse
from engine.request import FinishReason
from telemetry.events import EngineEnded, Event, Incident
from tests.fakes.sessions import Running, read, request, session

pytestmark = pytest.mark.timeout(120)


class Engine:
    """daemon.watchdog.Watched, without a process."""

    engine_id = "e1"
    pid = None

    def __init__(self) -> None:
        self.ticks = 1

    def beat(self) -> Beat:
        return Beat(0, self.ticks, "forward", 7)

    def read_stacks(self) -> str:
        return ""


class Bench:
    def __init__(self, deadline_s: float = 10.0) -> None:
        self.now_ns = 0
        self.events: list[Event] = []
        self.engine = Engine()
        self.dog = Watchdog(deadline_s, self.events.append, lambda: ["r1"], lambda: self.now_ns)

    def look(self, seconds: float, moving: bool = False, every_s: float = 0.5) -> list[str]:
        said = []
        for _ in range(int(seconds / every_s)):
            self.now_ns += int(every_s * 1e9)
            self.engine.ticks += moving
            said.append(self.dog.look(self.engine))
        return [word for word in said if word]


def test_one_report_at_the_deadline_and_one_end_at_twice() -> None:
    b = Bench()
    assert b.look(30, moving=True) == []
    assert b.look(9.5) == []
    assert b.look(1) == ["report"]
    assert b.look(9) == []
    assert b.look(1.5) == ["end"]
    assert b.look(60) == []


def test_a_released_wedge_starts_again_from_nothing() -> None:
    b = Bench()
    assert b.look(15) == ["report"]
    assert b.look(1, moving=True) == []
    assert b.look(19.5) == ["report"]


def test_time_in_which_nobody_looked_does_not_count() -> None:
    b = Bench()
    b.look(1)
    b.now_ns += 3600 * 10**9  # the machine was suspended, and the engine with it
    assert b.look(5) == []
    assert b.look(1, moving=True) == []


def test_the_report_names_phase_step_and_requests() -> None:
    b = Bench()
    b.look(11)
    b.dog.report(b.engine)
    (incident,) = b.events
    assert isinstance(incident, Incident)
    assert (incident.kind, incident.request_ids) == ("wedged", ("r1",))
    assert "forward of step 7" in incident.summary
    assert "test_the_report_names_phase" in incident.stacks["daemon"]


def test_the_pulse_is_seen_by_the_other_side() -> None:
    mine = Pulse.create()
    other = Pulse.attach(os.dup(mine.descriptor))
    other.step(5)
    other.tick("forward")
    other.tick("sample")
    beat = mine.read()
    assert (beat.ticks, beat.phase, beat.step) == (2, "sample", 5)
    mine.close()
    other.close()
    with pytest.raises(ValueError, match="released"):
        mine.read()


def lifecycle(running: Running, deadline_s: float) -> Lifecycle:
    return Lifecycle(running.session.view, lambda _: None, progress_deadline_s=deadline_s)


@pytest.mark.asyncio
async def test_a_wedge_that_is_released_is_an_incident_and_no_request_is_lost(tmp_path: Path) -> None:  # case 24
    async with session(tmp_path, progress_deadline_s=2.0, hang_at_step=3, hang_s=3.2) as running:
        life = lifecycle(running, 2.0)
        assert life.readiness() == (True, "")
        stream = running.session.submit([request("r", 6)])[0]
        await running.until(lambda: bool(running.of(Incident)), 60)
        ready, why = life.readiness()
        outputs = await read(stream, 60)
        (incident,) = running.of(Incident)
        assert isinstance(incident, Incident)
        assert (incident.kind, incident.request_ids) == ("wedged", ("r",))
        assert "launch" in incident.summary
        assert "_hang" in incident.stacks["engine"]  # its main thread, though it is in C and holds the interpreter
        assert "MainThread" in incident.stacks["daemon"]
        assert not ready
        assert "no progress" in why
        assert outputs[-1].finish is FinishReason.LENGTH
        await running.until(lambda: life.readiness() == (True, ""), 60)
        assert running.session.view().restarts == 0


@pytest.mark.asyncio
async def test_one_that_is_not_released_is_ended_and_all_its_requests_are_told(tmp_path: Path) -> None:
    async with session(tmp_path, progress_deadline_s=1.0, hang_at_step=3) as running:
        streams = running.session.submit([request("a", 6), request("b", 6, prompt=(7, 8))])
        ends = [outputs[-1] for outputs in await asyncio.gather(*(read(stream, 60) for stream in streams))]
        assert [end.finish for end in ends] == [FinishReason.ERROR, FinishReason.ERROR]
        await running.until(lambda: running.session.view().state == "ready", 60)
        (ended,) = running.of(EngineEnded)
        assert isinstance(ended, EngineEnded)
        assert (ended.cause, sorted(ended.victims)) == ("wedged", ["a", "b"])
        assert [incident.kind for incident in running.of(Incident) if isinstance(incident, Incident)] == ["wedged"]


@pytest.mark.asyncio
async def test_a_step_that_is_slow_but_moves_is_left_alone(tmp_path: Path) -> None:  # case 25
    async with session(tmp_path, progress_deadline_s=4.0, crawl_at_step=1, crawl_s=9.0) as running:
        life = lifecycle(running, 4.0)
        stream = running.session.submit([request("r", 3)])[0]
        reader = asyncio.create_task(read(stream, 60))
        while not reader.done():
            assert life.readiness()[0]
            await asyncio.sleep(0.1)
        assert (await reader)[-1].finish is FinishReason.LENGTH
        assert running.of(Incident) == []
        await asyncio.sleep(5)  # and idle is progress
        assert life.readiness()[0]
        assert running.of(Incident) == []


@pytest.mark.asyncio
async def test_a_stopped_process_is_stuck_and_the_kernel_says_how(tmp_path: Path) -> None:
    async with session(tmp_path, progress_deadline_s=0.8) as running:
        pid = running.session.view().pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await running.until(lambda: bool(running.of(Incident)), 60)
        (incident,) = running.of(Incident)
        assert isinstance(incident, Incident)
        assert "state T" in incident.stacks["engine"]
        await running.until(lambda: running.session.view().restarts == 1, 60)


@pytest.mark.asyncio
async def test_a_death_from_outside_is_an_incident_with_its_last_words(tmp_path: Path) -> None:
    async with session(tmp_path, step_s=0.05) as running:
        stream = running.session.submit([request("r", 100)])[0]
        await asyncio.sleep(0.2)
        os.kill(running.session.view().pid or 0, signal.SIGKILL)
        await read(stream)
        (incident,) = running.of(Incident)
        assert isinstance(incident, Incident)
        assert (incident.kind, incident.cause, incident.request_ids) == ("killed", "killed", ("r",))
        assert incident.end is not None
        assert incident.end.exit_code == -9
        assert incident.engine_id


def test_own_stacks_name_every_thread() -> None:
    assert "thread MainThread:" in own_stacks()
