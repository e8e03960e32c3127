"""The queue in front of the engine is bounded by requests and by tokens; what is too much is shed."""

import asyncio
from pathlib import Path

import pytest

from daemon.admission import Keys, Queue, is_loopback
from daemon.api.errors import ApiError
from daemon.api.record import Stopwatch, Trace, partition
from engine.errors import ConfigError
from engine.request import EngineFacts
from tests.fakes.api import serving
from tests.fakes.port import ScriptedPort, saying


async def test_five_thousand_requests_at_one_slot_are_shed_and_memory_stays_bounded() -> None:
    """Case 31."""
    async with ScriptedPort(saying("ok", hang_after=1), rows=1) as port, serving(port, max_requests=20) as api:
        kept = [asyncio.create_task(api.chat()) for _ in range(21)]
        async with asyncio.timeout(60):
            while len(port.seen.requests) < 21 or not api.first_tokens:
                await asyncio.sleep(0.005)
        shed = 0
        for _ in range(50):
            async with asyncio.TaskGroup() as group:
                posts = [group.create_task(api.chat()) for _ in range(100)]
            shed += sum(post.result()[0] == 429 for post in posts)
        assert shed == 5000
        assert len(port.seen.requests) == 21
        assert len(api.kitchen.live) == 21
        async with api.client.post(api.url + "/v1/completions", json={"model": "tiny", "prompt": "x"}) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        for task in kept:
            task.cancel()
        await api.settled(5022, timeout_s=60)
    assert {r.reason for r in api.records} == {"shed", "abort"}


async def test_prompt_tokens_that_wait_are_bounded_too() -> None:
    async with ScriptedPort(saying("ok"), rows=8) as port, serving(port, max_tokens=100) as api:
        port.pause()
        first = asyncio.create_task(api.complete(prompt="x" * 500))  # alone, however long
        async with asyncio.timeout(60):
            while not port.seen.requests:
                await asyncio.sleep(0.002)
        status, body = await api.complete(prompt="y")
        assert (status, body["error"]["code"]) == (429, "queue_full_tokens")
        port.resume()
        assert (await first)[0] == 200
        assert (await api.complete(prompt="y"))[0] == 200


async def test_rows_that_are_free_do_not_count_as_queue() -> None:
    async with ScriptedPort(saying("ok"), rows=8) as port, serving(port, max_requests=0) as api:
        port.pause()
        tasks = [asyncio.create_task(api.chat()) for _ in range(9)]
        async with asyncio.timeout(60):
            while len(port.seen.requests) < 8:
                await asyncio.sleep(0.002)
        port.resume()
        assert sorted([(await task)[0] for task in tasks]) == [200] * 8 + [429]


def test_retry_after_follows_the_throughput() -> None:
    now = 100.0
    queue = Queue(1000, 10**6, lambda: 0, clock=lambda: now)
    assert queue.retry_after_s() == 1, "nothing is known"
    for _ in range(20):
        now += 1.0
        ticket = queue.enter()
        ticket.charge(1, 10)
        ticket.started()
        ticket.close(served=True)
    waiting = [queue.enter() for _ in range(10)]
    assert 9 <= queue.retry_after_s() <= 11, "one a second, ten wait"
    for ticket in waiting:
        ticket.close(served=False)
        ticket.close(served=False)
    assert queue.sizes() | {"admission_served_window": 0} == dict.fromkeys(queue.sizes(), 0)
    now += 1000
    assert queue.retry_after_s() == 1


def test_a_refused_charge_leaves_the_account_as_it_was() -> None:
    queue = Queue(3, 100, lambda: 1)
    first, second = queue.enter(), queue.enter()
    first.charge(2, 90)
    with pytest.raises(ApiError, match="tokens"):
        second.charge(1, 20)
    with pytest.raises(ApiError, match="requests"):
        second.charge(4, 1)
    second.close(served=False)
    assert (queue.waiting_choices, queue.waiting_tokens) == (2, 90)
    first.started()
    first.started()
    assert (queue.waiting_choices, queue.waiting_tokens, queue.running_choices) == (0, 0, 2)
    first.close(served=True)
    assert queue.running_choices == 0


def test_a_key_file_that_everybody_can_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-a\n")
    file.chmod(0o600)
    Keys.load(str(file), None)
    assert not caplog.records
    file.chmod(0o644)
    Keys.load(str(file), None)
    assert "every user of this machine can read" in caplog.text
    assert "sk-a" not in caplog.text


def test_keys_come_from_a_file_or_the_environment(tmp_path: "pytest.TempPathFactory") -> None:
    file = tmp_path / "keys"  # type: ignore[operator]
    file.write_text("# mine\nsk-a\n\n  sk-b  \n")
    keys = Keys.load(str(file), "sk-env")
    for key in ("sk-a", "sk-b", "sk-env"):
        assert keys.allows(f"Bearer {key}")
        assert keys.allows(f"bearer {key}")
    for header in (None, "", "Bearer ", "Bearer # mine", "sk-a", "Basic sk-a"):
        assert not keys.allows(header)
    assert not Keys.load(None, None)
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="no key"):
        Keys.load(str(file), None)
    with pytest.raises(ConfigError, match="cannot read"):
        Keys.load(str(file) + "x", None)


def test_loopback_is_recognized() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_the_partition_sums_whatever_the_engine_says() -> None:
    watch = Stopwatch(1000)
    watch.tokenize_ns = 100
    watch.submitted(1300)
    good = EngineFacts(received_ns=1310, emitted_ns=1400, queue_ns=10, prefill_ns=30, decode_ns=50)
    wrong = EngineFacts(received_ns=0, emitted_ns=0, queue_ns=10**12, decode_ns=-5)
    assert partition(watch, good, 1405, 1500) == {
        "admission": 200,
        "tokenize": 100,
        "wire_in": 10,
        "queue": 10,
        "prefill": 30,
        "decode": 50,
        "wire_out": 5,
        "finish": 95,
    }
    for facts in (good, wrong, None):
        for taken_ns in (0, 1300, 1405, 10**9):
            stages = partition(watch, facts, taken_ns, 1500)
            assert sum(stages.values()) == 500
            assert all(ns > 0 for ns in stages.values())


@pytest.mark.parametrize("bad", ["", "x", f"00-{'0' * 32}-{'1' * 16}-01", f"ff-{'1' * 32}-{'1' * 16}-01", "00-1-1-1"])
def test_a_malformed_traceparent_is_no_trace(bad: str) -> None:
    asked: list[bool | None] = []

    def decide(trace_id: str, parent: bool | None) -> bool:
        asked.append(parent)
        return True

    ours = Trace.begin(bad, decide)
    assert (len(ours.trace_id), len(ours.span_id), ours.parent_span_id) == (32, 16, "")
    theirs = Trace.begin(f"00-{'1' * 32}-{'2' * 16}-00", decide)
    assert (theirs.trace_id, theirs.parent_span_id, theirs.sampled) == ("1" * 32, "2" * 16, True)
    assert theirs.response == f"00-{'1' * 32}-{theirs.span_id}-01"
    assert asked == [None, False]
    assert Trace.begin(bad, decide, "a=1").state == "", "without a trace it belongs to none"
    for state, kept in (("a=1,b=2", "a=1,b=2"), ("x" * 513, ""), ("a=\n", ""), (None, "")):
        assert Trace.begin(f"00-{'1' * 32}-{'2' * 16}-00", decide, state).state == kept
    assert len({theirs.span_of(index) for index in range(5)}) == 5
