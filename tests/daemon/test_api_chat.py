"""/v1/chat/completions and /v1/completions over real HTTP, against scripted tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from daemon.api.openai import OpenAi
from engine.request import FinishReason, Request
from telemetry.events import STAGES
from tests.fakes.api import MODEL, Api, serving
from tests.fakes.port import Script, ScriptedPort, saying

TEXT = "Grüße, 世界! 🦀 end"


@asynccontextmanager
async def api_saying(text: str = TEXT, *, how: dict[str, Any] | None = None, **kwargs: Any) -> AsyncIterator[Api]:
    async with ScriptedPort(saying(text, **(how or {}))) as port, serving(port, **kwargs) as api:
        yield api


def content(events: list[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for event in events
        if event != "[DONE]"
        for choice in event["choices"]
        if choice["index"] == index
    )


async def test_a_chat_answers_with_text_usage_and_finish_reason() -> None:
    async with api_saying() as api:
        status, body = await api.chat(max_tokens=100)
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    produced = len(TEXT.encode())
    prompt = len("<user>hi")
    assert body["usage"]["completion_tokens"] == produced
    assert body["usage"]["prompt_tokens"] == prompt
    assert body["usage"]["total_tokens"] == prompt + produced


async def test_a_stream_begins_with_the_role_ends_with_done_and_splits_no_character() -> None:
    async with api_saying() as api:
        events = await api.stream(max_tokens=100)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1] == "[DONE]"
    assert content(events) == TEXT
    assert "�" not in content(events)
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 2) + ["stop"]
    assert events[-2]["choices"][0]["delta"] == {}
    assert all(e["choices"][0]["delta"]["content"] for e in events[1:-2]), "no empty chunks"
    assert all("usage" not in e for e in events[:-1])


async def test_usage_comes_in_exactly_one_chunk_without_choices_if_asked_for() -> None:
    async with api_saying() as api:
        events = await api.stream(stream_options={"include_usage": True})
        without = await api.stream(stream_options={"include_usage": False})
    with_usage = [e for e in events[:-1] if e.get("usage")]
    assert len(with_usage) == 1
    assert with_usage[0] is events[-2]
    assert with_usage[0]["choices"] == []
    assert with_usage[0]["usage"]["completion_tokens"] == len(TEXT.encode())
    assert not [e for e in without[:-1] if e.get("usage")]


async def test_max_tokens_ends_with_length() -> None:
    async with api_saying("abcdef") as api:
        _, body = await api.chat(max_tokens=3)
        events = await api.stream(max_completion_tokens=3)
    assert body["choices"][0]["message"]["content"] == "abc"
    assert body["choices"][0]["finish_reason"] == "length"
    assert content(events) == "abc"
    assert events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("burst", [1, 2, 3, 7, 100])
async def test_stop_strings_never_leak_however_tokens_are_split(burst: int) -> None:
    """Streamed and whole text are the same, and no chunk is empty."""
    async with api_saying("one STXP two STOP three", how={"burst": burst}) as api:
        _, body = await api.chat(stop=["STOP", "never"])
        events = await api.stream(stop=["STOP", "never"])
        await api.settled(2)
    assert body["choices"][0]["message"]["content"] == content(events) == "one STXP two "
    assert body["choices"][0]["finish_reason"] == events[-2]["choices"][0]["finish_reason"] == "stop"
    assert all(e["choices"][0]["delta"]["content"] for e in events[1:-2])
    assert [r.reason for r in api.records] == ["stop", "stop"]


async def test_an_unfinished_stop_string_at_the_end_is_text() -> None:
    async with api_saying("go ST") as api:
        events = await api.stream(stop="STOP")
    assert content(events) == "go ST"


async def test_the_engine_stops_working_when_a_stop_string_was_found() -> None:
    async with api_saying("aSTOP" + "b" * 2000) as api:
        await api.chat(stop="STOP")
        await api.settled(1)
        assert api.port.seen.cancelled == [(api.records[0].request_id, "stop")]
    assert api.records[0].output_tokens == 5


async def test_choices_of_one_request_come_interleaved_and_share_a_group() -> None:
    def script(request: Request) -> Script:
        return Script(tokens=tuple(f"choice {request.index} says so".encode()))

    async with ScriptedPort(script) as port, serving(port) as api:
        events = await api.stream(n=3, seed=7)
        _, body = await api.chat(n=2)
        await api.settled(5)
    for index in range(3):
        assert content(events, index) == f"choice {index} says so"
    assert [c["message"]["content"] for c in body["choices"]] == ["choice 0 says so", "choice 1 says so"]
    order = [e["choices"][0]["index"] for e in events[:-1]]
    assert order != sorted(order), "not one after another"
    sent = port.seen.requests[:3]
    assert len({r.group_id for r in sent}) == 1
    assert len({r.sampling.seed for r in sent}) == 3
    assert sorted(r.index for r in api.records[:3]) == [0, 1, 2]


async def test_a_seed_decides_the_seeds_of_all_choices() -> None:
    async with api_saying() as api:
        await api.chat(n=2, seed=7)
        await api.chat(n=2, seed=7)
        await api.chat(n=2)
        seeds = [r.sampling.seed for r in api.port.seen.requests]
    assert seeds[:2] == seeds[2:4] != seeds[4:]


async def test_chat_logprobs_go_with_their_text() -> None:
    async with api_saying("ab é") as api:
        _, body = await api.chat(logprobs=True, top_logprobs=2)
        events = await api.stream(logprobs=True, top_logprobs=2)
    entries = body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(e["bytes"]) for e in entries) == "ab é".encode()
    assert entries[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }
    streamed = [e for event in events[:-1] for e in (event["choices"][0]["logprobs"] or {}).get("content", [])]
    assert streamed == entries


@pytest.mark.parametrize("burst", [1, 3, 50])
async def test_logprobs_do_not_leak_a_stop_string(burst: int) -> None:
    async with api_saying("ab STOP cd", how={"burst": burst}) as api:
        events = await api.stream(logprobs=True, stop=" STOP")
    tokens = [e["token"] for event in events[:-1] for e in (event["choices"][0]["logprobs"] or {}).get("content", [])]
    assert "".join(tokens) == content(events) == "ab"


async def test_completions_take_strings_lists_and_tokens() -> None:
    async with api_saying("ok") as api:
        for prompt, choices in (("x", 1), (["x", "y"], 2), ([120, 121], 1), ([[120], [121, 122]], 2)):
            status, body = await api.complete(prompt=prompt)
            assert status == 200, body
            assert [c["text"] for c in body["choices"]] == ["ok"] * choices
            assert [c["index"] for c in body["choices"]] == list(range(choices))
    assert [r.prompt for r in api.port.seen.requests] == [
        (120,),
        (120,),
        (121,),
        (120, 121),
        (120,),
        (121, 122),
    ]
    assert api.port.seen.requests[0].sampling.max_tokens == 16


async def test_chat_without_max_tokens_may_use_the_rest_of_the_context() -> None:
    async with ScriptedPort(context=100) as port, serving(port) as api:
        await api.chat()
        assert port.seen.requests[0].sampling.max_tokens == 100 - len("<user>hi")


async def test_completions_echo_the_prompt_and_its_logprobs() -> None:
    async with api_saying("cd") as api:
        _, body = await api.complete(prompt="ab", echo=True, logprobs=1)
        streamed = await api.stream("/v1/completions", prompt="ab", echo=True)
        _, tokens = await api.complete(prompt=[97, 98], echo=True)
    choice = body["choices"][0]
    assert choice["text"] == "abcd"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "d"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"b": -0.5}, {"c": -0.5}, {"d": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }
    assert "".join(e["choices"][0]["text"] for e in streamed[:-1]) == "abcd"
    assert tokens["choices"][0]["text"] == "abcd"


async def test_completions_logprobs_zero_names_only_the_chosen_token() -> None:
    async with api_saying("cd") as api:
        _, body = await api.complete(logprobs=0)
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -0.5]
    assert body["choices"][0]["logprobs"]["top_logprobs"] is None


async def test_models_tokenize_detokenize_version() -> None:
    async with api_saying() as api:
        async with api.client.get(api.url + "/v1/models") as response:
            models = await response.json()
        async with api.client.get(api.url + "/v1/models/alias") as response:
            alias = await response.json()
        tokenized = await api.post("/tokenize", {"model": MODEL, "prompt": "ab"})
        chat = await api.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
        back = await api.post("/detokenize", {"tokens": [97, 98]})
        async with api.client.get(api.url + "/version") as response:
            version = await response.json()
    assert [m["id"] for m in models["data"]] == [MODEL, "alias"]
    assert alias["root"] == MODEL
    assert tokenized == (200, {"tokens": [97, 98], "count": 2, "max_model_len": 4096})
    assert chat[1]["count"] == len("<user>x")
    assert back == (200, {"prompt": "ab"})
    assert "version" in version


async def test_sampling_parameters_reach_the_engine() -> None:
    async with api_saying() as api:
        await api.chat(
            model="alias",
            temperature=0.5,
            top_p=0.9,
            top_k=-1,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=-0.3,
            logit_bias={"5": 1.5},
            seed=3,
            stop_token_ids=[9],
            min_tokens=1,
            max_tokens=30,
            priority=2,
            cache_salt="s",
            user="u",
            metadata={"a": "b"},
            tools=[],
            response_format={"type": "text"},
            store=None,
        )
        (request,) = api.port.seen.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, -0.3)
    assert (sampling.logit_bias, sampling.seed, sampling.min_tokens, sampling.max_tokens) == (((5, 1.5),), 3, 1, 30)
    assert sampling.stop_token_ids == (9, 256)
    assert (request.priority, request.cache_salt) == (2, "s")


async def test_ignore_eos_leaves_the_models_end_token_out() -> None:
    async with api_saying() as api:
        await api.chat(ignore_eos=True)
        assert api.port.seen.requests[0].sampling.stop_token_ids == ()


async def test_every_choice_has_a_record_whose_stages_sum_to_its_life() -> None:
    async with api_saying() as api:
        await api.stream(n=2)
        await api.complete()
        await api.chat(temperature=9)
        await api.chat(model="other")
        await api.settled(5)
    assert len(api.records) == 5
    for record in api.records:
        assert sum(record.stages.values()) == record.at_ns - record.arrival_ns
        assert all(ns > 0 for ns in record.stages.values())
        assert set(record.stages) <= set(STAGES)
    assert [r.reason for r in api.records] == ["stop", "stop", "length", "rejected", "rejected"]
    assert [r.status for r in api.records] == [200, 200, 200, 400, 404]
    assert {"admission", "wire_in", "decode", "finish"} <= set(api.records[0].stages)
    assert len(api.first_tokens) == 3
    assert api.first_tokens[0].ttft_ns > 0


async def test_request_ids_are_echoed_and_traces_recorded() -> None:
    trace, span = "a" * 32, "b" * 16
    async with api_saying() as api:
        headers = {"X-Request-Id": "mine-1", "traceparent": f"00-{trace}-{span}-01"}
        async with api.client.post(
            api.url + "/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers
        ) as response:
            assert response.headers["X-Request-Id"] == "mine-1"
        async with api.client.get(api.url + "/version", headers={"X-Request-Id": "no spaces allowed"}) as response:
            assert response.headers["X-Request-Id"] not in ("", "no spaces allowed")
    (record,) = api.records
    assert (record.group_id, record.trace_id, record.parent_span_id) == ("mine-1", trace, span)
    assert record.trace_sampled
    assert api.first_tokens[0].trace_id == trace


@pytest.mark.parametrize(
    ("code", "status", "seen"),
    [("out_of_memory", 500, "out_of_memory"), ("context_length_exceeded", 400, "context_length_exceeded")],
)
async def test_an_engines_error_is_typed_before_the_first_token(code: str, status: int, seen: str) -> None:
    async with ScriptedPort(lambda _: Script(tokens=(), error_code=code)) as port, serving(port) as api:
        for stream in (False, True):
            got, body = await api.chat(stream=stream)
            assert (got, body["error"]["code"]) == (status, seen)
        await api.settled(2)
    assert [r.reason for r in api.records] == ["error", "error"]


async def test_a_deadline_is_a_504() -> None:
    late = Script(tokens=(), finish=FinishReason.DEADLINE)
    async with ScriptedPort(lambda _: late) as port, serving(port, request_timeout_s=30) as api:
        status, body = await api.chat()
        await api.settled(1)
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    assert api.records[0].reason == "deadline"
    assert port.seen.requests[0].deadline_ns == api.records[0].arrival_ns + 30_000_000_000


async def test_when_the_engine_dies_every_stream_ends_with_an_error_event() -> None:
    async with ScriptedPort(saying("abc" * 50, hang_after=10)) as port, serving(port) as api:
        streams = [asyncio.create_task(api.stream(max_tokens=200, n=n)) for n in (1, 1, 2)]
        async with asyncio.timeout(60):
            while len(api.first_tokens) < 4:
                await asyncio.sleep(0.002)
        await asyncio.sleep(0.02)
        port.die()
        for events in await asyncio.gather(*streams):
            assert events[-1]["error"]["code"] == "engine_died"
            assert content(events[:-1]) == ("abc" * 50)[:10]
        status, body = await api.chat()
        assert (status, body["error"]["code"]) == (503, "engine_not_ready")
        port.state("ready")
        await api.settled(5)
    assert [r.reason for r in api.records] == ["error"] * 4 + ["shed"]
    assert all(sum(r.stages.values()) == r.at_ns - r.arrival_ns for r in api.records)


async def test_the_public_client_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    async with (
        api_saying("Hello there", keys=["sk-test"]) as api,
        openai.AsyncOpenAI(base_url=api.url + "/v1", api_key="sk-test", max_retries=0) as client,
    ):
        messages: Any = [{"role": "user", "content": "hi"}]
        whole = await client.chat.completions.create(model=MODEL, messages=messages, n=2, logprobs=True)
        assert [c.message.content for c in whole.choices] == ["Hello there"] * 2
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there"
        assert chunks[-1].usage is not None
        text = await client.completions.create(model=MODEL, prompt="x", echo=True, logprobs=2)
        assert text.choices[0].text == "xHello there"
        assert (await client.models.list()).data[0].id == MODEL
        again = [*messages, whole.choices[0].message.model_dump()]
        assert (await client.chat.completions.create(model=MODEL, messages=again)).choices
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=messages)
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=messages, temperature=3)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-wrong").models.list()
        api.lifecycle.drain("test")
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model=MODEL, messages=messages)


def test_every_route_of_the_api_is_listed_once() -> None:
    make: Callable[[], OpenAi] = lambda: OpenAi(None)  # type: ignore[arg-type]  # noqa: E731
    paths = [route.path for route in make().routes()]
    assert len(paths) == len(set(paths))
