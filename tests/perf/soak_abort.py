"""64 clients connect and leave at random moments for ten minutes: nothing may stay behind in either process."""

import asyncio
import json
import random
import time
from typing import Any

import aiohttp

from tests.perf.harness import Findings
from tests.perf.served import Served, anonymous_bytes, serving

TITLE = "64 clients connect and leave for ten minutes"
PROMISE = "over the second half at most 1 KiB a request in either process; no block active at the end"
CLIENTS = 64
SEED = 11
_MOST_BYTES_A_REQUEST = 1024


async def client(http: aiohttp.ClientSession, url: str, seed: int, until_s: float, done: list[int]) -> None:
    """Streams and plain requests in turn, each left at a random moment (now and then read to its end)."""
    rng = random.Random(seed)
    while time.perf_counter() < until_s:
        body = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": f"Number {rng.randrange(10**9)}: tell me a story."}],
            "max_tokens": rng.choice((4, 32, 128)),
            "stream": rng.random() < 0.7,
        }
        patience = None if rng.random() < 0.1 else rng.uniform(0.0, 3.0)
        try:
            async with asyncio.timeout(patience), http.post(f"{url}/v1/chat/completions", json=body) as reply:
                await reply.read()
        except TimeoutError:
            pass  # the client left: that is the point
        except aiohttp.ClientError as reason:
            raise RuntimeError(f"the daemon dropped a connection: {reason}") from reason
        done[0] += 1


async def sample_memory(daemon: Served, until_s: float, done: list[int], every_s: float) -> list[dict[str, Any]]:
    """Anonymous resident bytes of both processes over requests and time: what a leak would be made of. (The flight
    recorders' files are mapped and become resident as they fill.)"""
    engine, began = daemon.engine_pid(), time.perf_counter()
    rows = []
    while time.perf_counter() < until_s:
        await asyncio.sleep(every_s)
        rows.append(
            {
                "at_s": round(time.perf_counter() - began, 1),
                "requests": done[0],
                "daemon_bytes": anonymous_bytes(daemon.pid),
                "engine_bytes": anonymous_bytes(engine),
            }
        )
    return rows


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares through (x, y): y per x."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


async def soak(daemon: Served, seconds: float) -> tuple[list[dict[str, Any]], float | None]:
    """Memory samples, and active blocks after the last client left (None: not reported within 10 s)."""
    done, until = [0], time.perf_counter() + seconds
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as http:
        memory = asyncio.create_task(sample_memory(daemon, until, done, seconds / 120))
        await asyncio.gather(*(client(http, daemon.url, SEED + i, until, done) for i in range(CLIENTS)))
        active: float | None = None
        for _ in range(100):
            async with http.get(f"{daemon.url}/metrics") as reply:
                active = gauge(await reply.text(), "inferd_kv_blocks", 'state="active"')
            if active == 0:
                break
            await asyncio.sleep(0.1)
        return await memory, active


def gauge(text: str, name: str, label: str) -> float | None:
    """The sum of a metric's samples that carry a label, or None if there is none."""
    rows = [line for line in text.splitlines() if line.startswith(f"{name}{{") and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in rows) if rows else None


def run(quick: bool) -> Findings:
    """One soak; the slope is fitted over the second half."""
    # A pool so small that cached prefixes have filled it long before the second half.
    with serving("--max-num-seqs", "16", "--memory-limit", "1400MiB") as daemon:
        rows, active = asyncio.run(soak(daemon, 10 if quick else 600))
    half = rows[len(rows) // 2 :]
    slopes = {p: slope([(r["requests"], r[f"{p}_bytes"]) for r in half]) for p in ("daemon", "engine")}
    return Findings(
        runs=json.loads(json.dumps(rows)),
        summary={
            "requests": rows[-1]["requests"],
            "daemon: bytes a request": round(slopes["daemon"], 1),
            "engine: bytes a request": round(slopes["engine"], 1),
            "daemon: anonymous at the end (MiB)": round(rows[-1]["daemon_bytes"] / 2**20, 1),
            "engine: anonymous at the end (MiB)": round(rows[-1]["engine_bytes"] / 2**20, 1),
            "active blocks at the end": -1 if active is None else int(active),
        },
        met=max(slopes.values()) <= _MOST_BYTES_A_REQUEST and active == 0,
        seeds=[SEED + i for i in range(CLIENTS)],
    )
