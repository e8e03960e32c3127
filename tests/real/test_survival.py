"""What a daemon owes its clients when processes are killed, clients leave, and the operator stops it."""

import asyncio
import json
import os
import random
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.served import Served, wait_for
from tests.soaking import idle

CHAT = "/v1/chat/completions"


def body(tokens: int, stream: bool = True, seed: int = 0) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "messages": [{"role": "user", "content": f"Tell me a very long story about the number {seed}."}],
        "max_tokens": tokens,
        "stream": stream,
        "seed": seed,
        "ignore_eos": True,
    }


async def stream(
    session: aiohttp.ClientSession, url: str, request: dict[str, Any], started: asyncio.Event
) -> list[str]:
    """The data lines of one stream, to its end."""
    lines: list[str] = []
    async with session.post(url + CHAT, json=request) as response:
        assert response.status == 200
        async for raw in response.content:
            line = raw.decode().strip()
            if line.startswith("data: "):
                lines.append(line[6:])
                if len(lines) > 2:
                    started.set()
    return lines


async def under_streams(served: Served, count: int, tokens: int, act: Any) -> list[list[str]]:
    """Start `count` streams, call `act` once each has text, and give all their lines."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        started = [asyncio.Event() for _ in range(count)]
        tasks = [
            asyncio.create_task(stream(session, served.url, body(tokens, seed=i), started[i])) for i in range(count)
        ]
        await asyncio.wait_for(asyncio.gather(*(e.wait() for e in started)), 60)
        await asyncio.to_thread(act)
        return await asyncio.gather(*tasks)


class Prober:
    """Asks the open routes of the API port without pause; keeps every answer that was not 200."""

    def __init__(self, served: Served) -> None:
        self.failures: list[str] = []
        self.answers = 0
        self._served = served
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            for path in ("/health/live", "/metrics"):
                try:
                    status = self._served.get(path, timeout_s=5)[0]
                except OSError as error:
                    status, path = 0, f"{path}: {error}"
                self.answers += 1
                if status != 200:
                    self.failures.append(f"{path} {status}")

    def __enter__(self) -> "Prober":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def test_engine_killed_under_streams(served: Served) -> None:
    victims = served.engine_pids()
    assert len(victims) == 1
    with Prober(served) as prober:
        lines = asyncio.run(under_streams(served, 8, 2000, lambda: os.kill(victims[0], signal.SIGKILL)))
        served.wait_ready(60)
    for one in lines:
        assert any("error" in json.loads(line) for line in one if line != "[DONE]"), one[-3:]
    assert not prober.failures
    assert prober.answers > 10
    status, answer = served.post(CHAT, body(4, stream=False))
    assert status == 200, answer
    assert served.engine_pids() != victims
    assert b'inferd_engine_restarts_total{cause="killed"' in served.get("/metrics")[1]


def test_clients_come_and_go(served: Served) -> None:
    """64 clients connect and leave at random moments for 20 s; nothing of them is left."""
    rng = random.Random(20)

    async def client(session: aiohttp.ClientSession, until: float) -> int:
        done = 0
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            request = body(rng.choice([1, 8, 64]), stream=rng.random() < 0.7, seed=rng.randrange(1000))
            request["n"] = rng.choice([1, 1, 2])
            patience = rng.choice([0.0, 0.02, 0.2, 1.0, 5.0])
            try:
                async with asyncio.timeout(patience), session.post(served.url + CHAT, json=request) as response:
                    assert response.status in {200, 429}, await response.text()
                    await response.read()
            except TimeoutError:
                pass  # the client leaves: what this test is about
            done += 1
        return done

    async def everybody() -> int:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            until = asyncio.get_running_loop().time() + 20
            return sum(await asyncio.gather(*(client(session, until) for _ in range(64))))

    assert asyncio.run(everybody()) > 200
    wait_for(lambda: idle(served), 60, "no active block and every map empty")


def test_sigterm_lets_running_streams_finish(tmp_path: Path) -> None:
    served = Served(tmp_path, "smollm2").start()
    refused: list[int] = []

    def terminate() -> None:
        os.kill(served.pid, signal.SIGTERM)
        wait_for(lambda: served.get("/health/ready")[0] == 503, 60, "readiness false")
        assert served.get("/health/live")[0] == 200
        status, answer = served.post(CHAT, body(4, stream=False))
        assert answer["error"]["message"]
        refused.append(status)

    lines = asyncio.run(under_streams(served, 4, 96, terminate))
    assert refused == [503]
    assert all(one[-1] == "[DONE]" for one in lines)
    assert all("error" not in line for one in lines for line in one)
    assert served.process is not None
    assert served.process.wait(60) == 0


def test_engine_does_not_outlive_its_daemon(tmp_path: Path) -> None:
    served = Served(tmp_path, "smollm2").start()
    engines = served.engine_pids()
    assert engines
    os.kill(served.pid, signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in engines), 20, "the engine is gone")


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def proxied(port: int) -> AsyncIterator[str]:
    """The URL of a forwarding TCP proxy before `port`: it closes upstream when its client closes."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # either side went away; the other is told below
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(forward(reader, up_writer), forward(up_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("leave_after_s", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("through_proxy", [False, True])
def test_a_client_that_left_is_aborted(
    served: Served, leave_after_s: float, streaming: bool, through_proxy: bool
) -> None:
    async def leave() -> None:
        async with proxied(served.port) as proxy, aiohttp.ClientSession() as session:
            url = (proxy if through_proxy else served.url) + CHAT
            try:
                async with asyncio.timeout(leave_after_s):
                    async with session.post(url, json=body(4000, stream=streaming)) as response:
                        await response.read()
            except TimeoutError:
                return
            raise AssertionError("4,000 tokens within half a second?")

    asyncio.run(leave())
    wait_for(lambda: idle(served), 60, "the engine works for nobody")
