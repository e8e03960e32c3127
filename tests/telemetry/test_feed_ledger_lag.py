"""The event feed, the ledger and the lag meter: small parts, each with one promise."""

import asyncio
import threading
import time

import pytest

from telemetry import lag
from telemetry.events import Event, LoopLag, StateChanged
from telemetry.feed import READERS, Feed
from telemetry.ledger import Ledger


def note(i: int) -> StateChanged:
    return StateChanged(at_ns=i, state="ready", why="")


async def test_every_reader_gets_what_comes_after_it_began() -> None:
    feed = Feed()
    feed.take([note(0)])
    with feed.reader() as one:
        thread = threading.Thread(target=feed.take, args=([note(1), note(2)],))
        thread.start()
        assert await asyncio.wait_for(one.batch(), 60) == [note(1), note(2)]
        thread.join()
        with feed.reader() as two:
            waiting = asyncio.create_task(two.batch())
            await asyncio.sleep(0)
            feed.take([note(3)])
            assert await asyncio.wait_for(waiting, 60) == [note(3)]
            assert await asyncio.wait_for(one.batch(), 60) == [note(3)]
    assert feed.readers == 0


async def test_a_slow_reader_loses_the_oldest_and_it_is_counted() -> None:
    feed = Feed(queue_events=10)
    with feed.reader() as reader:
        for i in range(25):
            feed.take([note(i)])
        assert await asyncio.wait_for(reader.batch(), 60) == [note(i) for i in range(15, 25)]
    assert feed.lost == 15


async def test_readers_are_limited() -> None:
    feed = Feed()
    held = [feed.reader() for _ in range(READERS)]
    with pytest.raises(OverflowError):
        feed.reader()
    held[0].__exit__(None, None, None)
    feed.reader()


def test_a_reader_whose_loop_ended_does_not_hurt_the_feed() -> None:
    feed = Feed()

    async def begin() -> None:
        feed.reader()

    asyncio.run(begin())
    feed.take([note(1)])
    assert feed.readers == 1


def test_the_ledger_knows_who_owns_what() -> None:
    ledger = Ledger()
    ledger.book("cpu", "weights", 100)
    ledger.book("cpu", "kv", 50)
    ledger.book("cuda:0", "weights", 7)
    ledger.release("cpu", "weights", 30)
    ledger.release("cpu", "kv", 50)
    assert ledger.owners("cpu") == {"weights": 70}
    assert ledger.devices() == ["cpu", "cuda:0"]


def test_the_ledger_refuses_to_release_what_was_not_booked() -> None:
    ledger = Ledger()
    ledger.book("cpu", "kv", 50)
    with pytest.raises(ValueError, match="booked 50"):
        ledger.release("cpu", "kv", 51)
    with pytest.raises(ValueError, match="booked 0"):
        ledger.release("cpu", "weights", 1)
    with pytest.raises(ValueError, match="-1"):
        ledger.book("cpu", "kv", -1)
    assert ledger.owners("cpu") == {"kv": 50}


async def test_a_loop_that_was_blocked_shows_as_lag() -> None:
    said: list[Event] = []
    done = asyncio.Event()

    def publish(event: Event) -> None:
        said.append(event)
        done.set()

    watching = asyncio.create_task(lag.watch("api", publish, period_seconds=0.01, samples=3))
    await asyncio.sleep(0.002)
    time.sleep(0.08)  # noqa: ASYNC251 - blocking the loop is the point
    await asyncio.wait_for(done.wait(), 60)
    watching.cancel()
    assert isinstance(said[0], LoopLag)
    assert said[0].loop == "api"
    assert len(said[0].lags_us) == 3
    assert max(said[0].lags_us) >= 50_000
