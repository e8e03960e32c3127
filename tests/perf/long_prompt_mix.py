"""A 4,000-token prompt arrives among eight running short streams: what it does to their inter-token latency, and
whether a short request that comes after it must wait for its whole prefill."""

import asyncio
import time
from itertools import pairwise
from typing import Any

from daemon.load.client import Sample, connect
from daemon.load.report import percentile
from daemon.load.scenarios import Lengths, scenario
from daemon.load.workload import LoadRequest, Sizer, Workload
from tests.perf.harness import Findings
from tests.perf.served import serving

TITLE = "A 4,000-token prompt among 8 running short streams"
PROMISE = "their inter-token p95 at most 3 × what it was; a short request behind it does not wait for its prefill"
STREAMS = 8
CHUNK = 40  # prompt tokens in a step beside streams: the engine's own choice on a CPU


def prompts(seed: int, tokens: int, output: int, sizer: Sizer) -> Workload:
    return Workload(scenario("short", Lengths(tokens, tokens), Lengths(output, output)), seed, sizer)


def gaps(samples: list[Sample], begin_s: float, end_s: float) -> list[float]:
    """Inter-token gaps that ended inside [begin_s, end_s]."""
    return [b - a for s in samples for a, b in pairwise(s.chunks_s) if begin_s <= b <= end_s]


async def once(url: str, seed: int, quiet_tokens: int, long_tokens: int) -> dict[str, Any]:
    """One mix. The streams start together; when each has run a while, the long prompt comes, then a short one. They
    are three times as long as its prefill takes at a chunk a step, so that they outlast it
    unless the model ends them."""
    mixed_tokens = quiet_tokens + 3 * long_tokens // CHUNK
    async with connect(url) as client:
        sizer = await client.prepare()

        def ask(tokens: int, index: int, most: int) -> "asyncio.Task[Sample]":
            request: LoadRequest = prompts(seed, tokens, most, sizer).request(index)
            return asyncio.create_task(client.ask(request, time.perf_counter()))

        await ask(50, 900, 8)  # the first request of a daemon's life warms its code paths
        alone = [ask(60, i, quiet_tokens) for i in range(STREAMS)]
        quiet = list(await asyncio.gather(*alone))
        streams = [ask(60, 100 + i, mixed_tokens) for i in range(STREAMS)]
        await asyncio.sleep(max(s.chunks_s[0] - s.sent_s for s in quiet) + 0.5)
        long = ask(long_tokens, 500, 4)
        await asyncio.sleep(0.1)
        behind = ask(60, 600, 4)
        mixed = list(await asyncio.gather(*streams))
        long_sample, behind_sample = await long, await behind
    before = gaps(quiet, 0.0, float("inf"))
    during = gaps(mixed, long_sample.sent_s, long_sample.chunks_s[0])
    failed = [s.error for s in (*quiet, *mixed, long_sample, behind_sample) if s.error]
    outlasted = sum(s.chunks_s[-1] > long_sample.chunks_s[0] for s in mixed)  # the others said what they had to say
    if failed or outlasted < STREAMS // 2:
        raise RuntimeError(f"requests failed, or most streams ended before the long prompt's first token: {failed}")
    return {
        "seed": seed,
        "p95_before_s": round(percentile(before, 95), 4),
        "p95_during_s": round(percentile(during, 95), 4),
        "gaps_during": len(during),
        "streams_to_the_end": outlasted,
        "long_prompt_tokens": long_sample.prompt_tokens,
        "long_ttft_s": round(long_sample.chunks_s[0] - long_sample.sent_s, 3),
        "short_behind_ttft_s": round(behind_sample.chunks_s[0] - behind_sample.sent_s, 3),
    }


def run(quick: bool) -> Findings:
    """Three mixes on one daemon; the worst ratio counts."""
    seeds = [1] if quick else [1, 2, 3]
    quiet_tokens, tokens = (60, 1000) if quick else (100, 4000)
    with serving() as daemon:
        runs = [asyncio.run(once(daemon.url, seed, quiet_tokens, tokens)) for seed in seeds]
    ratio = max(r["p95_during_s"] / r["p95_before_s"] for r in runs)
    wait = max(r["short_behind_ttft_s"] / r["long_ttft_s"] for r in runs)
    return Findings(
        runs=runs,
        summary={
            "worst p95 during ÷ before": round(ratio, 2),
            "p95 before (s)": max(r["p95_before_s"] for r in runs),
            "p95 during (s)": max(r["p95_during_s"] for r in runs),
            "long prompt: first token (s)": max(r["long_ttft_s"] for r in runs),
            "short request behind it: first token (s)": max(r["short_behind_ttft_s"] for r in runs),
        },
        met=ratio <= 3.0 and wait < 0.5,
        seeds=seeds,
        notes=["'during' = gaps that end between the long prompt's headers on the wire and its first token"],
    )
