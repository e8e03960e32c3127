"""The API over a ScriptedPort, on a real port: `async with serving(port) as api` gives a client and what happened."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from daemon.admission import FrontDoor, Keys, Queue
from daemon.api.access import Access
from daemon.api.health import Health
from daemon.api.kitchen import Kitchen, Served
from daemon.api.openai import OpenAi
from daemon.app import RUNNER_OPTIONS, build_api
from daemon.lifecycle import Lifecycle
from daemon.sockets import listen
from telemetry.events import Event, FirstToken, RequestRecord
from tests.fakes.port import ScriptedPort
from tests.fakes.text import EOS, ByteText

MODEL = "tiny"


@dataclass
class Api:
    url: str
    client: aiohttp.ClientSession
    kitchen: Kitchen
    lifecycle: Lifecycle
    port: ScriptedPort
    events: list[Event] = field(default_factory=list)

    @property
    def records(self) -> list[RequestRecord]:
        return [e for e in self.events if isinstance(e, RequestRecord)]

    @property
    def first_tokens(self) -> list[FirstToken]:
        return [e for e in self.events if isinstance(e, FirstToken)]

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        async with self.client.post(self.url + path, json=body, **kwargs) as response:
            return response.status, await response.json()

    async def chat(self, **body: Any) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", chat_body(**body))

    async def complete(self, **body: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": "x", **body})

    async def stream(self, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
        """The events of a stream; the last one is '[DONE]' if it came."""
        full = chat_body(**body) if "chat" in path else {"model": MODEL, "prompt": "x", **body}
        async with self.client.post(self.url + path, json={**full, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return sse((await response.read()).decode("utf-8"))

    async def settled(self, records: int, timeout_s: float = 60.0) -> None:
        """Until so many records were published and nothing is going on any more."""
        async with asyncio.timeout(timeout_s):
            while len(self.records) < records or self.kitchen.live or self.kitchen.settling or self.port.live:
                await asyncio.sleep(0.002)


def chat_body(**body: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **body}


def sse(text: str) -> list[Any]:
    events = [part for part in text.split("\n\n") if part]
    assert all(part.startswith("data: ") for part in events), events
    data = [part.removeprefix("data: ") for part in events]
    return [d if d == "[DONE]" else json.loads(d) for d in data]


@asynccontextmanager
async def serving(
    port: ScriptedPort,
    *,
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    max_requests: int = 1000,
    max_tokens: int = 1_000_000,
    max_body_bytes: int = 1 << 20,
    holds: bool = False,
    request_timeout_s: float = 0.0,
    send_buffer_bytes: int = 0,
) -> AsyncIterator[Api]:
    events: list[Event] = []
    lifecycle = Lifecycle(port.view, events.append, progress_deadline_s=5.0)
    lifecycle.observe()
    access = Access(Keys(keys))
    limits = port.view().limits
    assert limits is not None
    kitchen = Kitchen(
        port=port,
        text=ByteText(),
        served=Served(names=(MODEL, "alias"), eos_token_ids=(EOS,), created=1),
        queue=Queue(max_requests, max_tokens, lambda: limits.max_num_seqs),
        publish=events.append,
        authorize=access.check,
        gate=lifecycle.gate,
        holds=holds,
        request_timeout_s=request_timeout_s,
    )
    health = Health(lifecycle, "0", lambda accept: (b"x 1\n", "text/plain"), lambda _: None)
    door = FrontDoor(keyless=not keys, host="127.0.0.1", origins=origins)
    app = build_api([*OpenAi(kitchen).routes(), *health.routes()], door, max_body_bytes=max_body_bytes)
    runner = web.AppRunner(app, **RUNNER_OPTIONS)
    await runner.setup()
    (listening,) = listen("127.0.0.1", 0)
    if send_buffer_bytes:  # what is accepted inherits it
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    await web.SockSite(runner, listening).start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as client:
            yield Api(url, client, kitchen, lifecycle, port, events)
    finally:
        await runner.cleanup()
