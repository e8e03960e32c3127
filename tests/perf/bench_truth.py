"""`inferd bench load`'s latencies against the server's own histograms of the same requests."""

import asyncio
from typing import Any

from autotune.workload import MIXES
from daemon.load.client import connect
from daemon.load.drive import Drive
from daemon.load.report import latencies
from daemon.load.workload import Workload
from tests.daemon.load.truth import Scrape
from tests.perf.harness import Findings
from tests.perf.served import Served, serving

TITLE = "What bench measures against what the server measures"
PROMISE = "means within 3 %, percentiles within one bucket"
SEED, CONCURRENCY = 9, 8
HISTOGRAMS = {
    "ttft": "inferd_time_to_first_token_seconds",
    "inter_token": "inferd_inter_token_latency_seconds",
    "end_to_end": "inferd_request_seconds",
}


async def load(served: Served, requests: int) -> dict[str, dict[str, float | int]]:
    async with connect(served.url, connections=CONCURRENCY) as client:
        drive = Drive(Workload(MIXES["short"], SEED, await client.prepare()), client.ask)
        await drive.closed(CONCURRENCY, requests)
    if failed := [s.error for s in drive.samples if s.error]:
        raise RuntimeError(f"{len(failed)} requests failed: {sorted(set(failed))}")
    await asyncio.sleep(2)  # the last records reach the metrics
    return latencies(drive.samples)


def run(quick: bool) -> Findings:
    """Client's figures beside the growth of the server's histograms."""
    with serving() as served:
        asyncio.run(load(served, 2))  # the first request of a daemon's life is its own case
        before = Scrape.of(served)
        ours = asyncio.run(load(served, 8 if quick else 240))
        grown = Scrape.of(served) - before
    runs: list[dict[str, Any]] = []
    for name, histogram in HISTOGRAMS.items():
        client, mean = ours[name], grown.mean(histogram)
        off = {
            f"p{p}": grown.bucket(histogram, float(client[f"p{p}"])) - grown.percentile_bucket(histogram, p)
            for p in (50, 95, 99)
        }
        error = abs(float(client["mean"]) - mean) / mean
        runs.append({"figure": name, "client": dict(client), "server_mean": mean, "error": error, "buckets_off": off})
    met = all(r["error"] <= 0.03 and all(abs(n) <= 1 for n in r["buckets_off"].values()) for r in runs)
    summary: dict[str, float | int | str] = {}
    for r in runs:
        means = f"{r['client']['mean'] * 1e3:.2f} / {r['server_mean'] * 1e3:.2f} ms"
        summary[f"{r['figure']}: mean, client / server"] = f"{means} ({r['error']:.1%})"
        summary[f"{r['figure']}: buckets off, p50 p95 p99"] = " ".join(f"{n:+d}" for n in r["buckets_off"].values())
    return Findings(runs=runs, summary=summary, met=met, seeds=[SEED])
