"""What the server says a request took against what its client measured, over thousands of requests."""

import asyncio
import contextlib
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from daemon.load.client import events
from tests.perf.harness import Findings
from tests.perf.served import serving

TITLE = "Server stages against the client's clock"
PROMISE = (
    "5,000 requests: the stages sum to the record's length; against the client's own times p50 within 2 %, "
    "p99 within max(5 %, 25 ms)"
)
SEED = 9
REQUESTS, AT_ONCE = 5000, 16
KEPT = 512  # records that a daemon keeps: they are fetched before they are forgotten
_MS = 1e-3


@contextlib.contextmanager
def _tiny() -> Iterator[str]:
    """A tiny random model: this is about clocks, not about arithmetic."""
    from tests.fakes.tiny import write_tiny

    with tempfile.TemporaryDirectory(prefix="inferd-perf-") as folder:
        write_tiny("llama", Path(folder) / "tiny", seed=SEED)
        yield str(Path(folder) / "tiny")


class _Clock(aiohttp.TraceConfig):
    """When each request's first byte was about to be sent: what this client did before that is no waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, float] = {}
        self.on_request_headers_sent.append(self._on_sent)

    async def _on_sent(self, _session: object, _context: object, about: aiohttp.TraceRequestHeadersSentParams) -> None:
        self.sent[about.headers["X-Request-Id"]] = time.perf_counter()


async def _one(http: aiohttp.ClientSession, clock: _Clock, url: str, number: int) -> float:
    """Seconds from before the first byte is sent until the last one is here. Every other one is a stream."""
    body = {
        "model": "tiny",
        "prompt": "x" * (1 + number * 7 % 200),
        "max_tokens": 48 + number % 96,
        "ignore_eos": True,
        "stream": bool(number % 2),
    }
    name = f"r{number}"
    async with http.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": name}) as reply:
        assert reply.status == 200, await reply.text()
        if body["stream"]:
            async for _ in events(reply):
                pass
        else:
            await reply.read()
    return time.perf_counter() - clock.sent[name]


async def _some(url: str, socket: Path, numbers: range) -> list[tuple[float, float, int]]:
    """(client's seconds, server's seconds, ns by which the stages miss the record's length), a pair a request."""
    waiting, clock = iter(numbers), _Clock()
    seconds: dict[int, float] = {}
    async with (
        aiohttp.ClientSession(trace_configs=[clock]) as http,
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as control,
    ):

        async def worker() -> None:
            for number in waiting:
                seconds[number] = await _one(http, clock, url, number)

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        found = []
        for number in numbers:
            async with control.get(f"http://inferd/inferd/v1/requests/r{number}") as reply:
                record = await reply.json()
            length_ns = record["at_ns"] - record["arrival_ns"]
            found.append((seconds[number], length_ns / 1e9, sum(record["stages"].values()) - length_ns))
    return found


def _at(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def run(quick: bool) -> Findings:
    """In batches that the daemon still remembers when they are over."""
    requests = 200 if quick else REQUESTS
    pairs: list[tuple[float, float, int]] = []
    with _tiny() as model, serving("--served-model-name", "tiny", model=model) as daemon:
        warm_up = range(REQUESTS, REQUESTS + AT_ONCE * 2)  # numbers of their own: a record is found by its number
        asyncio.run(_some(daemon.url, daemon.runtime / "control.sock", warm_up))
        for first in range(0, requests, KEPT // 2):
            numbers = range(first, min(first + KEPT // 2, requests))
            pairs += asyncio.run(_some(daemon.url, daemon.runtime / "control.sock", numbers))
    client, server = [c for c, _, _ in pairs], [s for _, s, _ in pairs]
    p50, p99 = ((_at(client, share), _at(server, share)) for share in (0.5, 0.99))
    longer = [s - c for c, s, _ in pairs if s > c]
    exact = all(miss == 0 for _, _, miss in pairs)
    near50 = abs(p50[0] - p50[1]) <= 0.02 * p50[0]
    near99 = abs(p99[0] - p99[1]) <= max(0.05 * p99[0], 25 * _MS)
    return Findings(
        runs=[{"client_ms": [round(c * 1e3, 2) for c in client], "server_ms": [round(s * 1e3, 2) for s in server]}],
        summary={
            "requests": len(pairs),
            "client_p50_ms": round(p50[0] * 1e3, 2),
            "server_p50_ms": round(p50[1] * 1e3, 2),
            "client_p99_ms": round(p99[0] * 1e3, 2),
            "server_p99_ms": round(p99[1] * 1e3, 2),
            "p50_apart_percent": round(100 * abs(p50[0] - p50[1]) / p50[0], 2),
            "client_longer_p50_ms": round(_at([c - s for c, s, _ in pairs], 0.5) * 1e3, 2),
            "server_longer_than_client": len(longer),
            "server_longer_at_most_ms": round(max(longer, default=0.0) * 1e3, 2),
            "records_whose_stages_sum_exactly": sum(miss == 0 for _, _, miss in pairs),
        },
        met=near50 and near99 and exact,
        seeds=[SEED],
        notes=[
            "a record begins when the handler has the request: before that it is in the socket, or parsed by aiohttp",
            f"{AT_ONCE} at once, half of them streams, on a tiny model; client and server share the cores",
            "longer: the client had the last byte before the server was on a core again to stamp that it was sent",
        ],
    )
