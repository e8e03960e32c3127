"""Requests over a context limit that was lowered for now, where the policy is to queue them: they wait in their place
until it is raised, and no longer than their deadline; whoever leaves or has to go meanwhile leaves nothing behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.daemon.test_api_leaving import idle, until
from tests.fakes.api import Api, chat_body, serving
from tests.fakes.port import ScriptedPort

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]
LOWERED = 64
LONG = {"max_tokens": 2 * LOWERED}


def held(api: Api) -> int:
    return api.kitchen.sizes()["api_held"]


async def limited(api: Api, context_limit: int) -> int:
    """Set the limit; returns the one before."""
    limits = api.port.view().limits
    assert limits is not None
    await api.port.set_limits(replace(limits, context_limit=context_limit))
    return limits.context_limit


@asynccontextmanager
async def lowered(**how: Any) -> AsyncIterator[tuple[Api, int]]:
    """An API that holds what is too long for now, with the limit lowered; and what the limit was before."""
    async with ScriptedPort() as port, serving(port, holds=True, **how) as api:
        yield api, await limited(api, LOWERED)


async def test_it_waits_until_the_limit_is_raised_and_shorter_ones_do_not() -> None:
    async with lowered() as (api, ceiling):
        long = asyncio.create_task(api.chat(**LONG))
        await until(lambda: held(api))
        assert (await api.chat(max_tokens=4))[0] == 200
        assert not long.done()
        assert api.kitchen.queue.waiting_tokens > 0
        await limited(api, ceiling)
        assert (await long)[0] == 200
        await api.settled(2)
        await until(lambda: idle(api))
        record = api.records[-1]
        assert record.reason == "stop"
        assert record.stages["admission"] > 0.9 * (record.stages["admission"] + record.stages["tokenize"])
        assert sum(record.stages.values()) == record.at_ns - record.arrival_ns
        assert held(api) == 0


async def test_at_its_deadline_it_is_told_which_limit_and_when_to_come_again() -> None:
    async with lowered(request_timeout_s=0.5) as (api, _):
        async with api.client.post(api.url + "/v1/chat/completions", json=chat_body(**LONG)) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "30")
            error = (await response.json())["error"]
        assert error["code"] == "context_limited"
        assert f"limited to {LOWERED} tokens" in error["message"]
        await until(lambda: idle(api))
        assert api.records[0].reason == "shed"


async def test_whoever_leaves_while_held_is_gone() -> None:
    async with lowered() as (api, _):
        long = asyncio.create_task(api.chat(**LONG))
        await until(lambda: held(api))
        long.cancel()
        await until(lambda: api.records and idle(api))
        assert api.records[0].reason == "abort"
        assert (held(api), api.port.seen.requests) == (0, [])


async def test_an_operator_can_end_one_that_is_held() -> None:
    async with lowered() as (api, _):
        long = asyncio.create_task(api.chat(**LONG))
        await until(lambda: held(api))
        (request_id,) = api.kitchen.live
        assert api.kitchen.abort(request_id) == 1
        status, body = await long
        assert (status, body["error"]["code"]) == (503, "aborted")
        await until(lambda: idle(api))
        assert api.records[0].reason == "abort"


async def test_a_stop_does_not_wait_for_those_that_are_held() -> None:
    async with lowered() as (api, _):
        long = asyncio.create_task(api.chat(**LONG))
        await until(lambda: held(api))
        api.lifecycle.drain("a test")
        status, body = await long
        assert (status, body["error"]["code"]) == (503, "draining")


async def test_what_is_held_is_bounded_by_the_queue() -> None:
    async with lowered(max_tokens=1) as (api, _):
        long = asyncio.create_task(api.chat(**LONG))
        await until(lambda: held(api))
        status, body = await api.chat(**LONG)
        assert (status, body["error"]["code"]) == (429, "queue_full_tokens")
        long.cancel()


async def test_what_is_too_long_for_ever_is_refused_at_once() -> None:
    async with lowered() as (api, ceiling):
        status, body = await api.chat(max_tokens=ceiling)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
