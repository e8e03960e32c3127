"""Thousands of short requests to one daemon, and what they leave behind: memory in both processes, series, maps.

Owns which maps may stay full when nobody asks anything. Its figures are judged by who asks for them:
tests/daemon/test_soak.py (CI), tests/perf/soak_requests.py (as many as fit), tests/real. Enter at `soak` and `idle`.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from tests.served import Served

MOST_BYTES_A_REQUEST = 1024
CLIENTS = 16
# Bounded by their own size, full or not as it comes: history that the instruments keep, and blocks that nobody holds.
KEPT = {
    *("fold_records", "fold_steps", "fold_groups", "admission_served_window", "casebook_ladders", "leak_figures"),
    *("mix_tokens", "pool_cached", "pool_dirty", "pool_free_runs", "pool_ages", "prefixes"),
}
SELDOM = 8  # series of what happens once in thousands of requests, such as a change by the tuner
PASSING = 8  # events on their way through a sink's queue: some always are


def sizes(served: Served) -> dict[str, int]:
    """Every map and queue of both processes."""
    return {name: size for part in served.snapshot("sizes")["sizes"].values() for name, size in part.items()}


def grown(served: Served, before: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Maps that hold more than `before`, of those that are not to."""
    return {
        name: (size, before.get(name, 0))
        for name, size in sizes(served).items()
        if name not in KEPT and size > before.get(name, 0) + PASSING
    }


def idle(served: Served) -> bool:
    """No active block, and nothing in any map or queue of either process that belongs to a request."""
    now = sizes(served)
    if KEPT - now.keys():  # the engine's first heartbeat is still to come
        return False
    held = {name: size for name, size in now.items() if name not in KEPT and size}
    return served.snapshot("kv")["kv"]["active"] == 0 and all(
        name.startswith("bus_") and size <= PASSING for name, size in held.items()
    )


def series(served: Served) -> set[str]:
    """Names with labels of all that is exposed now."""
    lines = served.control("/metrics")[1].decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")}


def anonymous_bytes(pid: int) -> int:
    """Resident bytes that no file stands behind: the rings' pages are a file's, and become resident as they fill."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))


def slope(points: list[tuple[int, int]]) -> float:
    """Theil-Sen: the median of the slopes of all pairs. One late allocation does not move it."""
    return median(
        (y - before_y) / (x - before_x)
        for index, (x, y) in enumerate(points)
        for before_x, before_y in points[:index]
        if x > before_x
    )


@dataclass
class Soaked:
    """`points`: (requests so far, daemon's bytes, engine's bytes). `halfway`: the series after half of them."""

    requests: int = 0
    points: list[tuple[int, int, int]] = field(default_factory=list)
    halfway: set[str] = field(default_factory=set)

    def slopes(self) -> dict[str, float]:
        """Bytes a request over the second half, by process."""
        half = sorted(self.points)[len(self.points) // 2 :]
        return {name: slope([(p[0], p[which]) for p in half]) for which, name in ((1, "daemon"), (2, "engine"))}


def soak(served: Served, requests: int, seconds: float = 3600.0, samples: int = 40) -> Soaked:
    """So many completions of two tokens from 16 clients, each prompt another; fewer if `seconds` are over. Raises
    AssertionError if one fails."""
    return asyncio.run(_soak(served, requests, seconds, samples))


async def _soak(served: Served, requests: int, seconds: float, samples: int) -> Soaked:
    daemon, engine = served.pid, served.engine_pid()
    until_s = time.monotonic() + seconds
    found = Soaked()

    def numbers() -> Iterator[int]:
        while found.requests < requests and time.monotonic() < until_s:
            found.requests += 1
            yield found.requests

    left = numbers()

    async def client(http: aiohttp.ClientSession) -> None:
        for number in left:
            body: dict[str, Any] = {"model": "tiny", "prompt": f"n{number}", "max_tokens": 2, "temperature": 0}
            async with http.post(f"{served.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            if number % (requests // samples) == 0:
                found.points.append((number, anonymous_bytes(daemon), anonymous_bytes(engine)))
            if number == requests // 2:
                found.halfway.update(await asyncio.to_thread(series, served))

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    return found
