"""A small OpenAI-compatible server in-process, whose delays and faults are scripted. For tests of clients."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass
class FakeOpenAI:
    """`faults[i]` is how the i-th chat request goes wrong: an HTTP status, 'drop', 'error', 'garbage', 'short' or
    'hang'. Each word of a prompt is two tokens to `/tokenize`."""

    model: str = "fake"
    first_s: float = 0.0
    gap_s: float = 0.0
    tokens_per_chunk: int = 1
    usage: bool = True
    tokenizer: bool = True
    api_key: str = ""
    faults: dict[int, int | str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    entered: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._authorize])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        if self.tokenizer:
            app.router.add_post("/tokenize", self._tokenize)
        return app

    @web.middleware
    async def _authorize(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "no"}}, status=401)
        return await handler(request)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"count": 2 * len((await request.json())["prompt"].split())})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        fault = self.faults.get(len(self.bodies) - 1)
        if isinstance(fault, int):
            return web.json_response({"error": {"message": "no"}}, status=fault)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.entered.set()
        try:
            return await self._stream(request, body, fault)
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any], fault: str | None) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)

        async def send(value: Any) -> None:
            await reply.write(f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode())

        await asyncio.sleep(self.first_s)
        await send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for i in range(body["max_tokens"] // self.tokens_per_chunk):
            await asyncio.sleep(self.gap_s if i else 0)
            await send({"choices": [{"delta": {"content": " x" * self.tokens_per_chunk}}]})
            if fault == "hang":
                await asyncio.Event().wait()
            elif fault == "drop":
                request.transport.abort()  # type: ignore[union-attr]
                return reply
            elif fault == "garbage":
                await send("{not json")
            elif fault == "error":
                await send({"error": {"message": "engine died"}})
            elif fault == "short":
                return reply
        await send({"choices": [{"delta": {}, "finish_reason": "length"}]})
        if self.usage and (body.get("stream_options") or {}).get("include_usage"):
            words = len(body["messages"][0]["content"].split())
            counts = {"prompt_tokens": 2 * words, "completion_tokens": body["max_tokens"]}
            await send({"choices": [], "usage": counts})
        await send("[DONE]")
        return reply


@asynccontextmanager
async def serving(fake: FakeOpenAI) -> AsyncIterator[str]:
    """Its base URL while it runs."""
    async with TestServer(fake.app()) as server:
        yield str(server.make_url("")).rstrip("/")
