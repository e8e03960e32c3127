"""The tuner as a part of the daemon: steered over the control routes, kept over a restart, and out of the way."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from autotune.objective import Targets
from autotune.watch import PARTS, window_between
from telemetry import snapshot
from telemetry.events import EngineStarted, LimitsView, RequestRecord, StepReport
from telemetry.fold import Fold
from tests.autotune.records import record
from tests.fakes.daemon import Made, running
from tests.fakes.port import Script

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]
_TUNER = "/inferd/v1/tuner"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def steer(made: Made, **order: Any) -> tuple[int, Any]:
    return await made.post(_TUNER, order, control=True)


async def test_it_is_frozen_released_pinned_and_set_over_the_control_route(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        status, known = await made.get(_TUNER, control=True)
        assert (status, known["state"], known["pinned"]) == (200, "watching", [])
        assert known["limits"]["max_num_seqs"]["live"]
        assert (await steer(made, freeze=True))[1]["tuner"]["state"] == "frozen"
        _, answer = await steer(made, set={"max_num_seqs": 3}, why="a test")
        assert answer["limits"]["max_num_seqs"] == 3
        assert answer["tuner"]["pinned"] == ["max_num_seqs"]
        limit = answer["tuner"]["limits"]["max_num_seqs"]
        assert (limit["value"], limit["source"], limit["why"]) == (3, "api", "a test")
        _, answer = await steer(made, pin=["prefill_chunk"])
        assert answer["tuner"]["pinned"] == ["max_num_seqs", "prefill_chunk"]
        _, answer = await steer(made, release=True)
        assert (answer["tuner"]["state"], answer["tuner"]["pinned"]) == ("watching", [])
        for bad in ({}, {"set": {"max_num_seqs": "3"}}, {"pin": ["nothing"]}, {"pin": [1]}, {"set": {"nothing": 1}}):
            assert (await steer(made, **bad))[0] == 400, bad


async def test_frozen_outlives_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        await steer(made, freeze=True)
    async with running(tmp_path) as made:
        assert (await made.get(_TUNER, control=True))[1]["state"] == "frozen"


async def test_it_can_be_turned_off(tmp_path: Path) -> None:
    async with running(tmp_path, settings={"tuner": "false"}) as made:
        assert (await made.get(_TUNER, control=True))[1]["state"] == "off"
        assert (await steer(made, freeze=True))[0] == 400
        assert (await steer(made, set={"max_num_seqs": 2}))[1]["limits"]["max_num_seqs"] == 2


async def test_beyond_a_limit_that_is_in_force_for_now_it_says_which_why_and_when_to_come_again(tmp_path: Path) -> None:
    async with running(tmp_path, lambda _: Script()) as made:
        ceiling = (await made.get(_TUNER, control=True))[1]["limits"]["context_limit"]["value"]
        limit = ceiling // 2
        await steer(made, set={"context_limit": limit}, why="long requests pushed out the rest")
        async with made.api.post(
            made.addresses.api + "/v1/chat/completions", json={**CHAT, "max_tokens": limit}
        ) as response:
            body = await response.json()
            assert (response.status, response.headers["Retry-After"]) == (503, "30")
        assert body["error"]["code"] == "context_limited"
        assert f"limited to {limit} tokens" in body["error"]["message"]
        assert "long requests pushed out the rest" in body["error"]["message"]
        status, body = await made.post("/v1/chat/completions", {**CHAT, "max_tokens": ceiling})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_beyond_such_a_limit_it_waits_where_the_policy_is_to_queue(tmp_path: Path) -> None:
    async with running(tmp_path, lambda _: Script(), settings={"context_policy": "queue"}) as made:
        ceiling = (await made.get(_TUNER, control=True))[1]["limits"]["context_limit"]["value"]
        await steer(made, set={"context_limit": ceiling // 2})
        asked = made.post("/v1/chat/completions", {**CHAT, "max_tokens": ceiling // 2})
        long = asyncio.create_task(asked)
        while not (await made.get("/inferd/v1/snapshot", control=True))[1]["sizes"]["daemon"].get("api_held"):
            await asyncio.sleep(0.05)
        assert not long.done()
        await steer(made, set={"context_limit": ceiling})
        assert (await long)[0] == 200


async def test_a_window_is_what_happened_between_two_snapshots() -> None:
    clock = [1_000_000_000_000]
    fold = Fold("tiny", clock=lambda: clock[0], wall=lambda: 0.0)

    def look() -> snapshot.Snapshot:
        return snapshot.build(fold, PARTS, snapshot.Views(latency_seconds=5))

    view = LimitsView(
        max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk=64, max_partial_prefills=2, context_limit=64,
        kv_blocks=50, spec_depth=0,
    )  # fmt: skip
    resolved = {
        "block_size": 16, "kv_block_bytes": 100, "kv_blocks": 50, "weights_bytes": 5000, "memory_limit_bytes": 20_000,
        "device": "cpu",
    }  # fmt: skip
    fold.take([EngineStarted(
        at_ns=clock[0], engine_id="e", pid=1, restarts=0, phases={}, resolved=resolved, reasons={}, limits=view
    )])  # fmt: skip
    before = look()
    events: list[StepReport | RequestRecord] = []
    for n in range(10):
        at = clock[0] + 100_000_000 * (n + 1)
        rows = b"".join(v.to_bytes(4, "little") for v in (0, 160, 1))
        events.append(StepReport(
            at_ns=at, step=n, collect_ns=50_000_000, prefill_tokens=8, decode_rows=2, context_tokens=300, running=2,
            waiting=3, waiting_capacity=3, kv_active=10 + n, kv_free=31, rows=rows,
            gaps_us=(50_000).to_bytes(4, "little"),
        ))  # fmt: skip
    base = clock[0] / 1e9
    events += [record(n, arrival_s=base + 1, output=11, ttft_s=0.1 if n else 9.0, gap_s=0.05) for n in range(4)]
    fold.take(events)
    clock[0] += 15_000_000_000
    fold.take([])
    now = look()
    window = window_between(before, now, Targets(ttft_s=1.0))
    assert window.seconds == 15.0
    assert (window.running, window.waiting, window.waiting_capacity) == pytest.approx((2.0, 3.0, 3.0))
    assert (window.kv_peak, window.largest_blocks) == (19, 11)
    assert window.fixed_bytes == 5000
    assert (window.finished, window.good) == (4, 3)  # one had to wait for its first token for too long
    assert len(window.samples) == 10
    assert window.samples[0].seconds == pytest.approx(0.1)  # until the next one began
    assert window.samples[-1].seconds == pytest.approx(0.05)
    assert {shape.output_tokens for shape in window.shapes} == {11}
