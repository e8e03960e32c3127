"""The bus: publishing never blocks, raises or loses without counting; sinks do not touch each other."""

import threading
import time
from pathlib import Path

import pytest

from telemetry import events
from telemetry.bus import Bus, Undelivered
from telemetry.events import Event, StateChanged
from telemetry.recorder import Recorder, read_ring


def note(i: int) -> StateChanged:
    return StateChanged(at_ns=i, state="ready", why=str(i))


def test_every_sink_gets_every_event_in_order() -> None:
    one: list[Event] = []
    two: list[Event] = []
    bus = Bus(None, {"one": one.extend, "two": two.extend})
    sent = [note(i) for i in range(2000)]
    for event in sent:
        bus.publish(event)
    assert bus.flush()
    assert one == two == sent
    assert bus.dropped() == {"one": 0, "two": 0}
    bus.close()


def test_an_event_is_in_the_recorder_before_publish_returns(tmp_path: Path) -> None:
    with Recorder.open(tmp_path / "ring", "daemon") as recorder:
        bus = Bus(recorder, {})
        bus.publish(note(1))
        assert [events.decode(payload) for _, payload in read_ring(tmp_path / "ring").records] == [note(1)]
        bus.close()


def test_a_sink_that_hangs_drops_and_counts_and_delays_nobody() -> None:
    release, got = threading.Event(), []

    def stuck(batch: list[Event]) -> None:
        release.wait(120)

    bus = Bus(None, {"stuck": stuck, "good": got.extend}, queue_events=100, batch_seconds=0.001)
    begin = time.monotonic()
    for i in range(1000):
        bus.publish(note(i))
        if i % 50 == 0:
            assert bus.flush(0) is False or i == 0
            assert bus.flush(60, sink="good")  # its queue is as short as the other's
    assert bus.flush(60, sink="good")
    assert time.monotonic() - begin < 100  # nobody waited for the other
    assert len(got) + bus.dropped()["good"] == 1000
    assert bus.dropped()["good"] == 0
    assert bus.dropped()["stuck"] >= 700
    release.set()
    bus.close()


def test_a_sink_that_raises_is_counted_logged_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    got: list[Event] = []

    def broken(batch: list[Event]) -> None:
        raise OSError("disk full")

    bus = Bus(None, {"broken": broken, "good": got.extend})
    for i in range(10):
        bus.publish(note(i))
        assert bus.flush()
    assert len(got) == 10
    assert bus.dropped() == {"broken": 10, "good": 0}
    assert sum("broken" in record.message for record in caplog.records) == 1
    bus.close()


def test_close_delivers_what_waits_and_counts_what_comes_later() -> None:
    got: list[Event] = []
    bus = Bus(None, {"sink": got.extend}, batch_seconds=0.2)
    for i in range(5):
        bus.publish(note(i))
    bus.close()
    bus.publish(note(6))
    assert len(got) == 5
    assert bus.dropped() == {"sink": 1}


def test_one_sink_can_be_flushed_while_another_hangs() -> None:
    release, got = threading.Event(), []
    bus = Bus(None, {"stuck": lambda batch: release.wait(120) and None, "fold": got.extend}, batch_seconds=10)
    bus.publish(note(1))
    assert bus.flush(60, sink="fold")
    assert got == [note(1)]
    assert not bus.flush(0.01)
    release.set()
    bus.close()


def test_close_leaves_a_hanging_sink_behind() -> None:
    release = threading.Event()
    bus = Bus(None, {"stuck": lambda batch: release.wait(120) and None}, batch_seconds=0)
    bus.publish(note(1))
    begin = time.monotonic()
    bus.close(timeout_s=0.05)
    assert time.monotonic() - begin < 60
    release.set()


def test_events_from_many_threads_are_all_delivered() -> None:
    got: list[Event] = []
    bus = Bus(None, {"sink": got.extend}, batch_seconds=0.001)

    def work(base: int) -> None:
        for i in range(500):
            bus.publish(note(base + i))

    threads = [threading.Thread(target=work, args=(base,)) for base in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bus.flush()
    assert len({event.at_ns for event in got}) == len(got) == 1500
    bus.close()


def test_an_event_that_cannot_be_encoded_is_counted(tmp_path: Path) -> None:
    with Recorder.open(tmp_path / "ring", "daemon") as recorder:
        bus = Bus(recorder, {})
        bus.publish(StateChanged(at_ns=0, state="ready", why=object()))  # type: ignore[arg-type]
        assert bus.dropped() == {"recorder": 1}
        bus.close()


@pytest.mark.parametrize(("error", "traceback"), [(Undelivered(1, "the disk is full"), False), (KeyError("x"), True)])
def test_a_sink_that_fails_is_said_once_and_only_a_bug_with_its_traceback(
    error: Exception, traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def sink(_: list[Event]) -> None:
        raise error

    bus = Bus(None, {"broken": sink})
    for _ in range(3):
        bus.publish(note(1))
        bus.flush()
    bus.close()
    assert caplog.text.count("further failures are only counted") == 1
    assert ("Traceback" in caplog.text) == traceback
