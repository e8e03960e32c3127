"""Where the time of a request went, over a scripted port: first tokens of a mixed load, and planted delays.

The stages against stamps that no stage uses, with the real scheduler: test_stage_sum.py.
"""

import asyncio
import random
import time
from collections.abc import Sequence

import aiohttp
import pytest
from aiohttp import web

from daemon.api.record import Stopwatch, partition
from daemon.port import OutputStream
from engine.request import EngineFacts, Request
from telemetry.events import STAGES
from telemetry.fold import Fold
from tests.fakes.api import MODEL, Api, serving
from tests.fakes.port import Script, ScriptedPort

REQUESTS = 300
AT_ONCE = 12
MS = 1_000_000
PLANTED_NS = 50 * MS


def mixed(request: Request) -> Script:
    """What a prompt asks for by its first token."""
    kind = chr(request.prompt[0])
    return {
        "e": Script(tokens=b"ab", error_code="out_of_memory"),
        "n": Script(tokens=b""),  # it ends at once: no token at all
        "l": Script(tokens=b"x" * 50, hang_after=3),  # its client leaves meanwhile
    }.get(kind, Script(tokens=b"word " * 4))


async def ask(api: Api, name: str, kind: str, chance: random.Random) -> None:
    """Nothing of what is answered matters here."""
    body = {"model": "none" if kind == "r" else MODEL, "prompt": kind, "max_tokens": 30}
    body |= {"n": chance.choice((1, 1, 1, 3)), "stream": kind == "l" or chance.random() < 0.5}
    try:
        async with api.client.post(f"{api.url}/v1/completions", json=body, headers={"X-Request-Id": name}) as response:
            if kind == "l":
                await response.content.readline()
                response.close()
            await response.read()
    except aiohttp.ClientError:
        assert kind == "l"


async def test_a_first_token_is_published_once_for_every_choice_that_has_one() -> None:
    chance = random.Random(3)
    kinds = [chance.choice("sssswwenlr") for _ in range(REQUESTS)]
    async with ScriptedPort(mixed, step_s=0.001) as port, serving(port) as api:

        async def worker(first: int) -> None:
            for number in range(first, REQUESTS, AT_ONCE):
                await ask(api, f"{kinds[number]}-{number}", kinds[number], chance)

        await asyncio.gather(*(worker(first) for first in range(AT_ONCE)))
        await api.settled(REQUESTS, timeout_s=60)
    for record in api.records:
        assert sum(record.stages.values()) == record.at_ns - record.arrival_ns
    assert {record.reason for record in api.records} == {"stop", "error", "abort", "rejected"}
    assert_first_tokens(api)


def assert_first_tokens(api: Api) -> None:
    """One first token for each choice that had any, also where nobody was left to read it; as the metric has it."""
    with_tokens = sorted(record.request_id for record in api.records if record.output_tokens)
    assert sorted(first.request_id for first in api.first_tokens) == with_tokens
    assert any(record.output_tokens == 0 for record in api.records)
    fold = Fold(MODEL)
    fold.take(api.events)
    with fold.reading() as state:
        assert state.ttft.count == len(with_tokens)
        assert state.ttft.sum > 0


async def stages_of(api: Api, name: str) -> dict[str, int]:
    async with asyncio.timeout(60):
        while not (found := [record for record in api.records if record.group_id == name]):
            await asyncio.sleep(0.002)
    return found[0].stages


async def planted(stage: str, monkeypatch: pytest.MonkeyPatch, delay_s: float) -> dict[str, int]:
    """The stages of a request that is held up for `delay_s` in just this one, by the one who is responsible for it."""
    async with ScriptedPort(lambda _: Script(tokens=b"ab")) as port, serving(port) as api:
        kitchen = api.kitchen
        if stage == "admission":
            monkeypatch.setattr(kitchen, "gate", lambda: time.sleep(delay_s))
        elif stage == "tokenize":
            encode = kitchen.text.encode
            monkeypatch.setattr(kitchen.text, "encode", lambda text: (time.sleep(delay_s), encode(text))[1])
        elif stage == "queue":
            port.pause()
            submit = port.submit

            def held(requests: Sequence[Request]) -> list[OutputStream]:
                asyncio.get_running_loop().call_later(delay_s, port.resume)
                return submit(requests)

            monkeypatch.setattr(port, "submit", held)
        elif stage == "finish":
            write_eof = web.Response.write_eof

            async def slow(self: web.Response, data: bytes = b"") -> None:
                await asyncio.sleep(delay_s)
                await write_eof(self, data)

            monkeypatch.setattr(web.Response, "write_eof", slow)
        headers = {"X-Request-Id": stage}
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
        async with api.client.post(f"{api.url}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
            await response.read()
        return await stages_of(api, stage)


@pytest.mark.parametrize("stage", ["admission", "tokenize", "queue", "finish"])
async def test_a_planted_delay_is_in_its_stage_alone(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):  # a busy machine holds things up by itself: once must be clean
        with monkeypatch.context() as patch:
            stages = await planted(stage, patch, PLANTED_NS / 1e9)
        assert stages[stage] >= PLANTED_NS * 0.9
        if sum(ns for name, ns in stages.items() if name != stage) < PLANTED_NS / 2:
            return
    raise AssertionError(f"other stages have a part of it: {stages}")


@pytest.mark.parametrize("stage", STAGES[2:-1])
def test_a_delay_that_the_engine_or_the_wire_had_is_in_its_stage_alone(stage: str) -> None:
    """From the engine's stamps: nothing that it reports is counted twice or moved."""
    plain = {"wire_in": 2, "queue": 3, "prefill": 5, "prefill_wait": 7, "decode": 11, "preempted": 13, "wire_out": 17}
    spent = {name: ns * MS + (PLANTED_NS if name == stage else 0) for name, ns in plain.items()}
    watch = Stopwatch(1000)
    watch.submitted(1000 + MS)
    received_ns = watch.submitted_ns + spent["wire_in"]
    inside = {f"{name}_ns": ns for name, ns in spent.items() if not name.startswith("wire")}
    emitted_ns = received_ns + sum(inside.values())
    facts = EngineFacts(received_ns=received_ns, emitted_ns=emitted_ns, **inside)
    taken_ns = emitted_ns + spent["wire_out"]
    assert partition(watch, facts, taken_ns, taken_ns + MS) == {"admission": MS, **spent, "finish": MS}
