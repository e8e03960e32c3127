"""5,000 short requests on a tiny model: memory stays flat in both processes, series and maps come back to idle."""

import asyncio
import json
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
import pytest

from tests.fakes.tiny import prepare_tiny, write_tiny
from tests.served import Served, wait_for

REQUESTS = 5000
CLIENTS = 16
SAMPLES = 40
MOST_BYTES_A_REQUEST = 1024
# Bounded by their own size, and full or not as it comes.
BOUNDED = {
    "leak_figures",
    "admission_served_window",
    "pool_dirty",
    "prefixes",
    "fold_records",
    "fold_steps",
    "fold_groups",
    "casebook_ladders",
}


def anonymous_bytes(pid: int) -> int:
    """Private memory: the rings' pages are a file's, and become resident as they are written."""
    memory = psutil.Process(pid).memory_info()
    return int(memory.rss - memory.shared)


def slope(points: list[tuple[int, int]]) -> float:
    """Theil-Sen: the median of the slopes of all pairs. One late allocation does not move it."""
    return median(
        (y - before_y) / (x - before_x)
        for index, (x, y) in enumerate(points)
        for before_x, before_y in points[:index]
        if x > before_x
    )


def series(served: Served) -> set[str]:
    lines = served.control("/metrics")[1].decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")}


def maps(served: Served) -> dict[str, int]:
    sizes = served.snapshot("sizes")["sizes"]
    return {name: size for part in sizes.values() for name, size in part.items() if name not in BOUNDED}


def grown(served: Served, idle: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Maps that hold more than when nobody had asked anything; a few events are always on their way through a queue."""
    return {name: (size, idle.get(name, 0)) for name, size in maps(served).items() if size > idle.get(name, 0) + 8}


async def ask(
    served: Served, processes: tuple[int, int], points: list[tuple[int, int, int]], halfway: set[str]
) -> None:
    left = iter(range(REQUESTS))

    async def client(http: aiohttp.ClientSession) -> None:
        for number in left:
            body: dict[str, Any] = {"model": "tiny", "prompt": f"n{number}", "max_tokens": 2, "temperature": 0}
            async with http.post(f"{served.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            if number % (REQUESTS // SAMPLES) == 0:
                points.append((number, anonymous_bytes(processes[0]), anonymous_bytes(processes[1])))
            if number == REQUESTS // 2:
                halfway.update(await asyncio.to_thread(series, served))

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))


@pytest.mark.timeout(600)
def test_5000_short_requests_leave_nothing_behind(tmp_path: Path) -> None:  # cases 8, 15
    prepare_tiny(tmp_path / "tiny", write_tiny("llama", tmp_path / "tiny"))
    args = ("--served-model-name", "tiny", "--max-num-seqs", "16", "--max-model-len", "64")  # a pool that is soon full
    with Served(tmp_path, str(tmp_path / "tiny"), *args) as served:
        idle = maps(served)
        processes = (served.pid, served.engine_pid())
        points: list[tuple[int, int, int]] = []
        halfway: set[str] = set()
        asyncio.run(ask(served, processes, points, halfway))
        half = sorted(points)[len(points) // 2 :]
        for which, name in ((1, "daemon"), (2, "engine")):
            found = slope([(point[0], point[which]) for point in half])
            assert found <= MOST_BYTES_A_REQUEST, f"{name}: {found:.0f} bytes a request"
        wait_for(lambda: not grown(served, idle), 30, f"the maps are as before: {grown(served, idle)} (now, at first)")
        assert len(halfway) == len(series(served))
        _, body = served.control("/inferd/v1/incidents")
        assert json.loads(body)["incidents"] == []
