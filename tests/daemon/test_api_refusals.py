"""What is refused, and how: always JSON in OpenAI's shape, 4xx for what is the client's fault, the parameter named."""

import asyncio
import json
import logging
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daemon.api.errors import ApiError
from daemon.api.schema import ChatBody, CompletionBody, parse_chat, parse_completion
from daemon.logs import client_faults
from tests.fakes.api import MODEL, Api, chat_body, serving
from tests.fakes.port import ScriptedPort, saying

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def text_body(**body: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x", **body}


# (path, body, parameter, code); the status is 400 unless the row has one
REFUSED: list[Any] = [
    (CHAT, chat_body(temperature=2.5), "temperature", "invalid_value"),
    (CHAT, chat_body(temperature=-1), "temperature", "invalid_value"),
    (CHAT, chat_body(temperature="hot"), "temperature", "invalid_type"),
    (CHAT, chat_body(temperature=True), "temperature", "invalid_type"),
    (CHAT, chat_body(temperature=10**400), "temperature", "invalid_type"),
    (CHAT, chat_body(top_p=0), "top_p", "invalid_value"),
    (CHAT, chat_body(top_p=1.1), "top_p", "invalid_value"),
    (CHAT, chat_body(top_k=-2), "top_k", "invalid_value"),
    (CHAT, chat_body(min_p=2), "min_p", "invalid_value"),
    (CHAT, chat_body(repetition_penalty=0), "repetition_penalty", "invalid_value"),
    (CHAT, chat_body(presence_penalty=3), "presence_penalty", "invalid_value"),
    (CHAT, chat_body(frequency_penalty=-3), "frequency_penalty", "invalid_value"),
    (CHAT, chat_body(max_tokens=0), "max_tokens", "invalid_value"),
    (CHAT, chat_body(max_completion_tokens=0), "max_completion_tokens", "invalid_value"),
    (CHAT, chat_body(max_tokens=1.5), "max_tokens", "invalid_type"),
    (CHAT, chat_body(min_tokens=5, max_tokens=4), "min_tokens", "invalid_value"),
    (CHAT, chat_body(n=0), "n", "invalid_value"),
    (CHAT, chat_body(n=10**6), "n", "invalid_value"),
    (CHAT, chat_body(seed=2**70), "seed", "invalid_value"),
    (CHAT, chat_body(stop=""), "stop", "invalid_value"),
    (CHAT, chat_body(stop=["a"] * 99), "stop", "invalid_value"),
    (CHAT, chat_body(stop=[1]), "stop[0]", "invalid_type"),
    (CHAT, chat_body(stop_token_ids=[10**6]), "stop_token_ids", "invalid_value"),
    (CHAT, chat_body(stop_token_ids=[-1]), "stop_token_ids", "invalid_value"),
    (CHAT, chat_body(logit_bias={"x": 1}), "logit_bias", "invalid_value"),
    (CHAT, chat_body(logit_bias={"1": 101}), "logit_bias", "invalid_value"),
    (CHAT, chat_body(logit_bias={"999999": 1}), "logit_bias", "invalid_value"),
    (CHAT, chat_body(top_logprobs=3), "top_logprobs", "invalid_value"),
    (CHAT, chat_body(logprobs=True, top_logprobs=21), "top_logprobs", "invalid_value"),
    (CHAT, chat_body(stream_options={"include_usage": True}), "stream_options", "invalid_value"),
    (CHAT, chat_body(tools=[{"type": "function"}]), "tools", "unsupported_parameter"),
    (CHAT, chat_body(response_format={"type": "json_object"}), "response_format", "unsupported_parameter"),
    (CHAT, chat_body(functions=[{}]), "functions", "unsupported_parameter"),
    (CHAT, chat_body(audio={"voice": "x"}), "audio", "unsupported_parameter"),
    (CHAT, chat_body(modalities=["audio"]), "modalities", "unsupported_parameter"),
    (CHAT, chat_body(temprature=1), "temprature", "unknown_parameter"),
    (CHAT, chat_body(messages=[]), "messages", "empty_prompt"),
    (CHAT, chat_body(messages=None), "messages", "missing_required_parameter"),
    (CHAT, chat_body(messages="hi"), "messages", "invalid_type"),
    (CHAT, chat_body(messages=[{"role": "king", "content": "x"}]), "messages[0].role", "invalid_value"),
    (CHAT, chat_body(messages=[{"role": "user"}]), "messages[0].content", "invalid_type"),
    (CHAT, chat_body(messages=[{"role": "user", "content": 5}]), "messages[0].content", "invalid_type"),
    (
        CHAT,
        chat_body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        "messages[0].content[0].type",
        "unsupported_parameter",
    ),
    (
        CHAT,
        chat_body(messages=[*HI, {"role": "assistant", "content": "x", "tool_calls": [{}]}]),
        "messages[1].tool_calls",
        "unsupported_parameter",
    ),
    (CHAT, {"messages": HI}, "model", "missing_required_parameter"),
    (CHAT, chat_body(model="gpt-4"), "model", "model_not_found", 404),
    (CHAT, chat_body(messages=[{"role": "user", "content": "x" * 5000}]), "messages", "context_length_exceeded"),
    (CHAT, chat_body(max_tokens=4096), "messages", "context_length_exceeded"),
    (CHAT, chat_body(messages=[{"role": "user", "content": "bad template"}]), None, "request_error"),
    (TEXT, text_body(prompt=""), "prompt", "empty_prompt"),
    (TEXT, text_body(prompt=[]), "prompt", "invalid_value"),
    (TEXT, text_body(prompt=["a", ""]), "prompt", "empty_prompt"),
    (TEXT, text_body(prompt=["a", 1]), "prompt", "invalid_type"),
    (TEXT, text_body(prompt=[1, "a"]), "prompt", "invalid_type"),
    (TEXT, text_body(prompt=[1, 999_999]), "prompt", "invalid_value"),
    (TEXT, text_body(prompt=[True]), "prompt", "invalid_type"),
    (TEXT, text_body(prompt={"a": 1}), "prompt", "invalid_value"),
    (TEXT, text_body(prompt=["x"] * 300), "prompt", "invalid_value"),
    (TEXT, text_body(suffix="end"), "suffix", "unsupported_parameter"),
    (TEXT, text_body(best_of=3), "best_of", "unsupported_parameter"),
    (TEXT, text_body(logprobs=99), "logprobs", "invalid_value"),
    (TEXT, text_body(max_tokens=0), "max_tokens", "invalid_value"),
    ("/tokenize", {"prompt": 5}, "prompt", "invalid_type"),
    ("/tokenize", {"prompt": "x", "messages": []}, "prompt", "invalid_value"),
    ("/tokenize", {"prompt": "x", "colour": 1}, "colour", "unknown_parameter"),
    ("/tokenize", {"messages": [5]}, "messages", "invalid_type"),
    ("/detokenize", {"tokens": ["x"]}, "tokens", "invalid_type"),
    ("/detokenize", {"tokens": [10**7]}, "prompt", "invalid_value"),
    ("/detokenize", {}, "tokens", "missing_required_parameter"),
]


async def test_every_refusal_names_the_parameter_and_leaves_one_record() -> None:
    async with ScriptedPort() as port, serving(port) as api:
        for path, body, param, code, *status in REFUSED:
            got, answer = await api.post(path, body)
            assert got == (status[0] if status else 400), (body, answer)
            error = answer["error"]
            assert (error["param"], error["code"]) == (param, code), (body, error)
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
        assert not port.seen.requests
        generations = [row for row in REFUSED if row[0].startswith("/v1")]
        await api.settled(len(generations))
    assert len(api.records) == len(generations)
    assert {r.reason for r in api.records} == {"rejected"}


async def raw(api: Api, method: str, path: str, **kwargs: Any) -> tuple[int, Any, Any]:
    async with api.client.request(method, api.url + path, **kwargs) as response:
        return response.status, json.loads(await response.read()), response.headers


async def test_broken_bodies_routes_and_methods_are_json_errors_too() -> None:
    json_type = {"Content-Type": "application/json"}
    async with ScriptedPort() as port, serving(port, max_body_bytes=2000) as api:
        for data, status, code in (
            (b"{", 400, "invalid_json"),
            (b"", 400, "invalid_json"),
            (b"\xff\xfe", 400, "invalid_json"),
            (b'{"model": NaN}', 400, "invalid_json"),
            (b"[" * 1500, 400, "invalid_json"),
            (b"[]", 400, "invalid_type"),
            (b'{"model": "\\ud800"}', 400, "invalid_json"),
            (b'{"max_tokens":' + b"9" * 1000 + b',"model":"tiny","prompt":"x"}', 400, "invalid_value"),
            (b"{" + b" " * 3000 + b"}", 413, "body_too_large"),
        ):
            for path in (CHAT, TEXT):
                got, body, _ = await raw(api, "POST", path, data=data, headers=json_type)
                if code != "invalid_value" or path == TEXT:
                    assert (got, body["error"]["code"]) == (status, code), (data[:20], body)
        got, body, _ = await raw(api, "POST", CHAT, data="model=x")
        assert (got, body["error"]["code"]) == (415, "unsupported_media_type")
        got, body, headers = await raw(api, "GET", CHAT)
        assert (got, body["error"]["code"], headers["Allow"]) == (405, "method_not_allowed", "POST")
        got, body, _ = await raw(api, "GET", "/v2/nothing")
        assert (got, body["error"]["code"]) == (404, "not_found")
        got, body, _ = await raw(api, "GET", "/v1/models/nope")
        assert (got, body["error"]["code"]) == (404, "model_not_found")
        assert (await api.complete())[0] == 200, "and it still serves"


async def raw_bytes(api: Api, data: bytes) -> bytes:
    """What the daemon answers to these bytes until it closes, or until the answer is whole."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(api.url).port)
    writer.write(data)
    async with asyncio.timeout(60):
        answer = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return answer


async def test_what_is_no_http_is_a_400_and_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 38's neighbours. aiohttp answers before any code of ours is asked, in plain text."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    server_log = logging.getLogger("aiohttp.server")
    monkeypatch.setattr(server_log, "filters", [client_faults])
    caplog.set_level(logging.INFO)
    async with ScriptedPort() as port, serving(port) as api:
        for data in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
            b"HELLO\r\n\r\n",
            b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
            head + b"Content-Length: -5\r\n\r\n",
            head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            head + b"Content-Length: 5\r\nContent-Encoding: gzip\r\n\r\nhello",
        ):
            assert b" 400 Bad Request" in await raw_bytes(api, data), data
        assert (await api.complete())[0] == 200, "and it still serves"
    assert "Traceback" not in caplog.text
    assert all(record.levelno <= logging.INFO for record in caplog.records)


async def test_a_body_that_is_too_large_or_too_slow_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.api.body.BODY_S", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with ScriptedPort() as port, serving(port) as api:
        assert b" 413 " in await raw_bytes(api, head + b"Content-Length: 99999999999\r\n\r\n{}")
        assert b" 408 " in await raw_bytes(api, head + b"Content-Length: 100\r\n\r\n{")
        await api.settled(2)
        assert [record.reason for record in api.records] == ["rejected", "rejected"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, "tools", "best_of", "x"])
BODIES = st.dictionaries(KEYS, JSON, max_size=6).map(lambda b: json.dumps({"model": MODEL, "messages": HI, **b}))


@settings(max_examples=400, deadline=None)
@given(BODIES | st.text().map(str) | st.builds(lambda b: json.dumps({"model": MODEL, "prompt": b}), JSON))
def test_parsing_gives_an_ask_or_an_api_error_and_nothing_else(body: str) -> None:
    for parse in (parse_chat, parse_completion):
        try:
            parse(body.encode("utf-8", "surrogatepass"))
        except ApiError as error:
            assert error.status == 400
            assert json.loads(error.body())["error"]["message"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(BODIES | st.binary(max_size=60).map(lambda b: b.decode("latin-1")), min_size=1, max_size=8))
def test_no_body_is_a_500_or_a_dropped_connection(bodies: list[str]) -> None:
    async def post_all() -> None:
        async with ScriptedPort(saying("ab", burst=4)) as port, serving(port) as api:
            for body in bodies:
                for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
                    async with api.client.post(
                        api.url + path, data=body.encode(), headers={"Content-Type": "application/json"}
                    ) as response:
                        text = await response.text()
                        assert response.status < 500, (path, body, text)
                        if response.status >= 400:
                            assert json.loads(text)["error"]["code"]
            assert (await api.chat())[0] == 200

    asyncio.run(post_all())


async def test_foreign_hosts_and_origins_are_refused_without_a_key() -> None:
    async with ScriptedPort() as port, serving(port) as api:
        for headers, status in (
            ({"Host": "evil.example"}, 403),
            ({"Host": "127.0.0.1.evil.example:80"}, 403),
            ({"Host": "localhost:1234"}, 200),
            ({"Host": "[::1]:80"}, 200),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Origin": "http://localhost:3000"}, 403),
        ):
            got, _, seen = await raw(api, "GET", "/v1/models", headers=headers)
            assert got == status, headers
            assert not [name for name in seen if name.lower().startswith("access-control")]
        own = api.url
        assert (await raw(api, "GET", "/v1/models", headers={"Origin": own}))[0] == 200


async def test_an_allowed_origin_may_call_and_no_other() -> None:
    origin = "https://ui.example"
    async with ScriptedPort() as port, serving(port, origins=[origin]) as api:
        got, _, seen = await raw(api, "GET", "/v1/models", headers={"Origin": origin})
        assert (got, seen["Access-Control-Allow-Origin"]) == (200, origin)
        async with api.client.options(api.url + CHAT, headers={"Origin": origin}) as response:
            assert response.status == 204
        got, _, seen = await raw(api, "GET", "/v1/models", headers={"Origin": "https://other.example"})
        assert got == 403
        assert "Access-Control-Allow-Origin" not in seen


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer nope", "Basic sk-1", "sk-1", "Bearer sk-1x", "Bearer é"])
async def test_a_wrong_key_is_a_401_and_a_record(header: str) -> None:
    async with ScriptedPort() as port, serving(port, keys=["sk-1", "sk-2"]) as api:
        headers = {"Authorization": header} if header else {}
        got, body, seen = await raw(api, "POST", CHAT, json=chat_body(), headers=headers)
        assert (got, body["error"]["code"]) == (401, "invalid_api_key")
        assert seen["WWW-Authenticate"] == "Bearer"
        for path in ("/v1/models", "/v1/models/tiny"):
            assert (await raw(api, "GET", path, headers=headers))[0] == 401
        for key in ("sk-1", "sk-2"):
            right = {"Authorization": f"Bearer {key}", "Host": "anything.example"}
            assert (await raw(api, "POST", CHAT, json=chat_body(), headers=right))[0] == 200
        async with api.client.get(api.url + "/health") as response:
            assert response.status == 200, "health is open"
    assert [r.status for r in api.records] == [401, 200, 200]
