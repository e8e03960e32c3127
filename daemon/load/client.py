"""One streamed request against an OpenAI-compatible server, stamped; and what to find out before the first one.

Owns the HTTP and SSE of a load test, and the translation of failures into bounded kinds. It must not know scenarios or
reports. Enter at `connect`, then `LoadClient.prepare` and `LoadClient.ask`. All stamps are `time.perf_counter` seconds
of this process.
"""

import asyncio
import json
import os
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp

from daemon.load.workload import LoadRequest, Sizer, calibration, sized

_PREPARE_TIMEOUT_S = 10.0
EMPTY = "empty"  # the error of an answer without text: the model had nothing to say, or its text got lost


class TargetError(Exception):
    """The server cannot be measured at all; the message says what to do."""


@dataclass(slots=True)
class Sample:
    """What one request saw. `due_s` is when it should have started, `sent_s` when its headers were on the wire: between
    them lies the client's own waiting. `chunks_s` are the arrivals of chunks with text."""

    kind: str
    prompt_tokens_aimed: int
    due_s: float
    started_s: float
    pooled_s: float = 0.0  # waiting for a connection: the pool's queue, name resolution and connecting
    sent_s: float = 0.0
    ended_s: float = 0.0
    chunks_s: list[float] = field(default_factory=list)
    error: str = ""  # a bounded kind; empty = it went well
    finish_reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    index: int = -1  # of the request
    answer: int = 0  # CRC-32 of its text: the same for the same answer
    counted: bool = False  # the server reported usage; else output_tokens counts chunks


@dataclass(slots=True)
class LoadClient:
    """Requests to one server and one model."""

    http: aiohttp.ClientSession
    url: str
    model: str = ""
    include_usage: bool = True
    timeout_s: float = 600.0
    longest: int = 0  # prompt and answer in tokens, if the server says (as vLLM does)
    ignore_eos: bool = False  # each answer as long as was asked for: an extension that inferd, vLLM and SGLang know

    async def prepare(self) -> Sizer:
        """Settle the model and measure how words become tokens. Raises TargetError."""
        known = await self._models()
        if not self.model:
            if not known:
                raise TargetError(f"{self.url} does not list its models; name one with --model")
            self.model = known[0]
        elif known and self.model not in known:
            raise TargetError(f"{self.url} does not serve {self.model!r}; it serves: {', '.join(known)}")
        opening, sample = calibration()
        counts = [await self._count(text) for text in (opening, sample)]
        return sized(counts[0], counts[1]) if counts[0] and counts[1] else Sizer()

    async def ask(self, request: LoadRequest, due_s: float) -> Sample:
        """Send one chat request, read its stream to the end. Never raises for what a server does."""
        sample = Sample(request.kind, request.prompt_tokens, due_s, time.perf_counter(), index=request.index)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": request.prompt}],
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "seed": request.seed,
            "stream": True,
            **({"stream_options": {"include_usage": True}} if self.include_usage else {}),
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self.http.post(f"{self.url}/v1/chat/completions", json=body, trace_request_ctx=sample) as reply,
            ):
                if reply.status == 200:
                    await self._read(reply, sample)
                else:
                    sample.error = f"http_{reply.status}"
        except TimeoutError:
            sample.error = "timeout"
        except aiohttp.ClientConnectorError:
            sample.error = "connect"
        except (aiohttp.ClientError, ConnectionError):
            sample.error = "disconnected"
        except (ValueError, TypeError, AttributeError, KeyError):  # not JSON, or not OpenAI's shape
            sample.error = "bad_reply"
        finally:
            sample.ended_s = time.perf_counter()
            sample.sent_s = sample.sent_s or sample.ended_s
        return sample

    async def _read(self, reply: aiohttp.ClientResponse, sample: Sample) -> None:
        done = False
        async for data in events(reply):
            if data == "[DONE]":
                done = True
                break
            chunk = json.loads(data)
            if "error" in chunk:
                sample.error = "stream_error"
                return
            _note(chunk, sample)
        if not sample.counted:
            sample.output_tokens = len(sample.chunks_s)
        if not done and not sample.finish_reason:
            sample.error = "cut_short"
        elif not sample.chunks_s:
            sample.error = EMPTY

    async def _models(self) -> list[str]:
        status, data = await self._call("GET", "/v1/models")
        if status in (401, 403):
            raise TargetError(f"{self.url} refuses the API key ({status}); name its variable with --api-key-env")
        if status == 404:
            return []
        try:
            self.longest = min((int(entry.get("max_model_len") or 0) for entry in data["data"]), default=0)
            return [str(entry["id"]) for entry in data["data"]]
        except (TypeError, KeyError, AttributeError, ValueError):
            raise TargetError(
                f"{self.url}/v1/models answers {status} and no list of models; is it OpenAI's API?"
            ) from None

    async def _count(self, text: str) -> int:
        """Tokens of a text as the server counts them (vLLM's form, then llama.cpp's), or 0 if it does not say."""
        for body in ({"model": self.model, "prompt": text}, {"content": text}):
            status, data = await self._call("POST", "/tokenize", body)
            if status == 200 and isinstance(data, dict):
                tokens = data.get("tokens")
                return int(data.get("count") or (len(tokens) if isinstance(tokens, list) else 0))
        return 0

    async def _call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON (None if it is not JSON). Raises TargetError if nobody answers."""
        try:
            async with (
                asyncio.timeout(_PREPARE_TIMEOUT_S),
                self.http.request(method, self.url + path, json=body) as reply,
            ):
                try:
                    return reply.status, await reply.json(content_type=None)
                except ValueError:
                    return reply.status, None
        except TimeoutError:
            raise TargetError(f"{self.url} does not answer within {_PREPARE_TIMEOUT_S:.0f} s") from None
        except aiohttp.ClientConnectorError as reason:
            why = os.strerror(reason.errno) if reason.errno and reason.errno > 0 else str(reason.os_error)
            raise TargetError(f"nobody listens at {self.url}: {why}") from None
        except (aiohttp.ClientError, ValueError) as reason:
            raise TargetError(f"{self.url} cannot be asked: {reason}") from None


def _note(chunk: dict[str, Any], sample: Sample) -> None:
    """Book one chunk: text, finish reason, usage."""
    for choice in chunk.get("choices") or ():
        if text := (choice.get("delta") or {}).get("content"):
            sample.chunks_s.append(time.perf_counter())
            sample.answer = zlib.crc32(text.encode(), sample.answer)
        sample.finish_reason = choice.get("finish_reason") or sample.finish_reason
    usage = chunk.get("usage")
    if usage:
        sample.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        sample.output_tokens = int(usage.get("completion_tokens") or 0)
        sample.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        sample.counted = True


async def events(reply: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of each server-sent event (WHATWG HTML, 9.2): lines of one event joined, comments and other fields left
    out."""
    data: list[str] = []
    async for raw in reply.content:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
    if data:
        yield "\n".join(data)


def _tracing() -> aiohttp.TraceConfig:
    """Stamps a sample when its connection is there and when its headers are on the wire."""
    trace = aiohttp.TraceConfig()

    async def connected(_: Any, context: SimpleNamespace, __: Any) -> None:
        sample = context.trace_request_ctx
        if sample is not None:
            sample.pooled_s = time.perf_counter() - sample.started_s

    async def sent(_: Any, context: SimpleNamespace, __: Any) -> None:
        sample = context.trace_request_ctx
        if sample is not None:
            sample.sent_s = time.perf_counter()

    trace.on_connection_create_end.append(connected)
    trace.on_connection_reuseconn.append(connected)
    trace.on_request_headers_sent.append(sent)
    return trace


@asynccontextmanager
async def connect(url: str, model: str = "", api_key: str = "", connections: int = 0) -> AsyncIterator[LoadClient]:
    """A client with up to `connections` connections at once; 0 = as many as there are requests."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=connections),
        timeout=aiohttp.ClientTimeout(total=None),
        trace_configs=[_tracing()],
        read_bufsize=1 << 20,
    ) as http:
        yield LoadClient(http, url.rstrip("/").removesuffix("/v1"), model)
