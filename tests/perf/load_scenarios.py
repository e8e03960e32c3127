"""`inferd bench load`'s three scenarios against the default model on this machine: the figures users will compare."""

import asyncio
from typing import Any

from daemon.load.client import connect
from daemon.load.drive import Drive
from daemon.load.report import Run, summarize
from daemon.load.scenarios import scenario
from daemon.load.workload import Workload
from tests.perf.harness import Findings
from tests.perf.served import serving

TITLE = "The load scenarios, default model, 8 at a time"
PROMISE = "every request succeeds"
SEED = 20
CONCURRENCY = 8


async def load(url: str, name: str, requests: int) -> dict[str, Any]:
    """The report of one scenario."""
    async with connect(url, connections=CONCURRENCY) as client:
        drive = Drive(Workload(scenario(name), SEED, await client.prepare()), client.ask)
        await drive.closed(CONCURRENCY, requests)
    about = {
        "url": "",
        "model": client.model,
        "scenario": name,
        "load": f"{requests} × {CONCURRENCY}",
        "seed": SEED,
        "prompt_sizes": "tokenize",
    }
    return summarize(
        Run(
            about=about,
            samples=drive.samples,
            unfinished=drive.unfinished,
            began_s=drive.began_s,
            ended_s=drive.ended_s,
            lag_s=drive.lag_s,
            interrupted=False,
        )
    )


def run(quick: bool) -> Findings:
    """Each scenario once on a daemon of its own, so that none finds the other's prefixes."""
    counts = {"short": 8, "long": 2, "mixed": 4} if quick else {"short": 128, "long": 24, "mixed": 64}
    reports = []
    for name, requests in counts.items():
        with serving() as daemon:
            reports.append(asyncio.run(load(daemon.url, name, requests)))
    summary: dict[str, float | int | str] = {}
    for report in reports:
        name, latency = report["scenario"], report["latency_s"]
        summary[f"{name}: output tokens/s"] = report["rates"]["output_tokens_per_s"]
        summary[f"{name}: prompt tokens/s"] = report["rates"]["prompt_tokens_per_s"]
        for figure in ("ttft", "inter_token", "end_to_end"):
            summary[f"{name}: {figure} p50 / p95 (s)"] = f"{latency[figure]['p50']:.3f} / {latency[figure]['p95']:.3f}"
    failed = sum(r["requests"]["failed"] + r["requests"]["unfinished"] for r in reports)
    return Findings(runs=reports, summary={**summary, "failed": failed}, met=failed == 0, seeds=[SEED])
