"""The load client and its driving, against a scripted server."""

import asyncio

import pytest

from autotune.workload import Job, Replay
from daemon.load.client import TargetError, connect
from daemon.load.drive import Drive
from daemon.load.scenarios import Lengths, scenario
from daemon.load.workload import Workload
from tests.fakes.openai_server import FakeOpenAI, serving

SHARES = scenario("short", Lengths(40, 60), Lengths(4, 4))


async def drive_closed(fake: FakeOpenAI, requests: int, concurrency: int, timeout_s: float = 60.0) -> Drive:
    async with serving(fake) as url, connect(url, connections=concurrency) as client:
        client.timeout_s = timeout_s
        drive = Drive(Workload(SHARES, 1, await client.prepare()), client.ask)
        await drive.closed(concurrency, requests)
        return drive


async def test_every_request_is_sent_once_and_never_more_at_a_time_than_asked() -> None:
    fake = FakeOpenAI(first_s=0.01)
    drive = await drive_closed(fake, requests=12, concurrency=3)
    assert len(drive.samples) == len(fake.bodies) == 12
    assert fake.most_running == 3
    assert not [s.error for s in drive.samples if s.error]
    assert drive.running == 0


async def test_a_sample_has_the_servers_counts_and_the_stamps_in_order() -> None:
    drive = await drive_closed(FakeOpenAI(first_s=0.05, gap_s=0.01), requests=2, concurrency=1)
    for sample in drive.samples:
        assert sample.counted
        assert sample.output_tokens == len(sample.chunks_s) == 4
        assert abs(sample.prompt_tokens - sample.prompt_tokens_aimed) <= 2
        stamps = [sample.due_s, sample.started_s, sample.sent_s, *sample.chunks_s, sample.ended_s]
        assert stamps == sorted(stamps)
        assert sample.chunks_s[0] - sample.sent_s >= 0.05
        assert sample.finish_reason == "length"


async def test_without_usage_tokens_are_chunks_and_without_a_tokenizer_words() -> None:
    fake = FakeOpenAI(usage=False, tokenizer=False)
    drive = await drive_closed(fake, requests=1, concurrency=1)
    assert drive.workload.sizer.source == "words"
    assert not drive.samples[0].counted
    assert drive.samples[0].output_tokens == 4
    assert fake.bodies[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (429, "http_429"),
        (500, "http_500"),
        ("drop", "disconnected"),
        ("error", "stream_error"),
        ("garbage", "bad_reply"),
        ("short", "cut_short"),
        ("hang", "timeout"),
    ],
)
async def test_a_fault_has_its_kind_and_spoils_no_other_request(fault: int | str, kind: str) -> None:
    timeout_s = 2.0 if fault == "hang" else 60.0
    drive = await drive_closed(FakeOpenAI(faults={1: fault}), requests=3, concurrency=1, timeout_s=timeout_s)
    assert [s.error for s in drive.samples] == ["", kind, ""]


async def test_a_server_that_vanishes_is_a_kind_too() -> None:
    async with serving(FakeOpenAI()) as url:
        pass
    async with connect(url, "m") as client:
        sample = await client.ask(Workload(SHARES, 1).request(0), 0.0)
    assert sample.error == "connect"


async def test_waiting_for_a_connection_is_the_clients_and_not_the_servers() -> None:
    """One connection, two requests at once: the second waits for the first, and its TTFT does not show it."""
    async with serving(FakeOpenAI(first_s=0.2)) as url, connect(url, connections=1) as client:
        drive = Drive(Workload(SHARES, 1, await client.prepare()), client.ask)
        await drive.closed(2, 2)
    first, second = sorted(drive.samples, key=lambda s: s.sent_s)
    assert second.pooled_s >= 0.15
    assert second.sent_s - second.due_s >= 0.15
    assert second.chunks_s[0] - second.sent_s < 0.15 + (first.chunks_s[0] - first.sent_s)


async def test_an_open_loop_sends_on_time_whatever_the_server_does() -> None:
    fake = FakeOpenAI(first_s=0.3)
    async with serving(fake) as url, connect(url) as client:
        drive = Drive(Workload(SHARES, 1, await client.prepare()), client.ask)
        await drive.send(Replay([Job(at_s=0.02 * n, prompt_tokens=50, output_tokens=4, serial=n) for n in range(4)]))
    assert fake.most_running == 4
    assert len(drive.samples) == 4
    assert drive.lag_s


async def test_a_stopped_drive_keeps_what_it_has_and_cuts_off_the_rest() -> None:
    fake = FakeOpenAI(faults={2: "hang", 3: "hang"})
    async with serving(fake) as url, connect(url) as client:
        drive = Drive(Workload(SHARES, 1, await client.prepare()), client.ask)

        async def stop_when_hanging() -> None:
            async with asyncio.timeout(60):
                while len(fake.bodies) < 4:
                    await asyncio.sleep(0.01)
            drive.stop()

        await asyncio.gather(drive.closed(2, 100), stop_when_hanging())
    assert (len(drive.samples), drive.unfinished, drive.running) == (2, 2, 0)


async def test_a_bug_in_asking_is_not_swallowed() -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Drive(Workload(SHARES, 1), broken).closed(1, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fake", "model", "says"),
    [
        (FakeOpenAI(api_key="secret"), "", "--api-key-env"),
        (FakeOpenAI(), "other", "it serves: fake"),
    ],
)
async def test_a_target_that_cannot_be_measured_says_why(fake: FakeOpenAI, model: str, says: str) -> None:
    async with serving(fake) as url, connect(url, model) as client:
        with pytest.raises(TargetError, match=says):
            await client.prepare()
