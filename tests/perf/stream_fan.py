"""256 streams at 40 tokens a second each through detokenizer, chunks and sockets, with an engine that costs nothing.

The server is one process with one loop; the clients read in another. What counts is the server's CPU time per token.
"""

import asyncio
import multiprocessing
import resource
import time
from typing import Any

from tests.fakes.api import chat_body, serving
from tests.fakes.port import ScriptedPort, saying
from tests.perf.harness import Findings

TITLE = "256 streams, 10,000 tokens a second, on one core"
PROMISE = "less than one core for the daemon's side (stand-in engine, byte tokenizer)"

_STREAMS = 256
_STEP_S = 0.025


def run(quick: bool) -> Findings:
    """Three runs; the CPU share of the middle one counts."""
    runs = [asyncio.run(_once(3.0 if quick else 10.0)) for _ in range(1 if quick else 3)]
    middle = sorted(runs, key=lambda r: float(r["cpu_share"]))[len(runs) // 2]
    return Findings(
        runs=runs,
        summary=middle,
        met=middle["cpu_share"] < 1.0 and middle["tokens_per_s"] > 9000,
        notes=["CPU time is the server process's, the scripted engine's included"],
    )


async def _once(seconds: float) -> dict[str, Any]:
    steps = int(seconds / _STEP_S)
    text = "word " * (steps // 5)
    async with ScriptedPort(saying(text), rows=_STREAMS, step_s=_STEP_S, context=10**6) as port, serving(port) as api:
        context = multiprocessing.get_context("spawn")
        clients = context.Process(target=_clients, args=(api.url, len(text)))
        clients.start()
        while len(api.first_tokens) < _STREAMS:
            await asyncio.sleep(0.01)
        begin, cpu = time.perf_counter(), _cpu_s()
        while len(api.records) < 1:
            await asyncio.sleep(0.05)
        wall, used = time.perf_counter() - begin, _cpu_s() - cpu
        while clients.is_alive():
            await asyncio.sleep(0.05)
        clients.join()
        given = sum(r.output_tokens for r in api.records)
        tokens = given * wall / (steps * _STEP_S) if wall < seconds else given
    return {
        "streams": _STREAMS,
        "tokens_per_s": round(tokens / wall),
        "cpu_share": round(used / wall, 3),
        "cpu_us_per_token": round(used / tokens * 1e6, 1),
    }


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _clients(url: str, max_tokens: int) -> None:
    asyncio.run(_read_all(url, max_tokens))


async def _read_all(url: str, max_tokens: int) -> None:
    import aiohttp

    async def one(session: aiohttp.ClientSession) -> None:
        body = chat_body(stream=True, max_tokens=max_tokens)
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            async for _ in response.content.iter_any():
                pass

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        await asyncio.gather(*(one(session) for _ in range(_STREAMS)))
