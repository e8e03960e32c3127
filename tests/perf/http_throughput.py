"""Tokens a second over HTTP against transformers' static `generate` on the same prompts, in turn, in one run; and how
far both are from what the machine's bandwidth and arithmetic allow."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from daemon import paths
from daemon.library import Library
from daemon.load.client import events
from daemon.load.scenarios import Lengths, scenario
from daemon.load.workload import Workload
from engine.config import EngineConfig
from engine.machine import host_facts
from tests.perf.harness import REPO, Findings
from tests.perf.served import serving

TITLE = "Throughput over HTTP against transformers' generate, default model"
PROMISE = "16 streams ≥ 1.5 × generate on a batch of 16 in its faster dtype; one stream ≥ its one stream"
SEED = 5
STREAMS = 16
PROMPT = 64
DTYPES = ("float32", "bfloat16")


class Baseline:
    """One transformers child."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.facts = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the transformers child ended with {self._process.wait()}")
        return dict(json.loads(line))


@contextmanager
def baseline(dtype: str) -> Iterator[Baseline]:
    """The default model in transformers. Its GGUF must be in the library: serving it once sees to that."""
    gguf = Library(paths.cache_dir(), lambda *_: None).pull("smollm2")
    command = [sys.executable, "-m", "tests.perf.transformers_child", str(gguf), dtype]
    quiet = {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with subprocess.Popen(
        command, cwd=REPO, env=quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Baseline(process)
        finally:
            process.kill()


async def prompts(url: str) -> list[list[int]]:
    """Seeded prompts of exactly PROMPT tokens, as the server tokenizes them."""
    work = Workload(scenario("short", Lengths(2 * PROMPT, 2 * PROMPT)), SEED)
    found = []
    async with aiohttp.ClientSession() as http:
        for index in range(STREAMS):
            body = {"model": "smollm2", "prompt": work.request(index).prompt}
            async with http.post(f"{url}/tokenize", json=body) as reply:
                found.append(list((await reply.json())["tokens"])[-PROMPT:])
    assert all(len(tokens) == PROMPT for tokens in found)
    return found


async def served(url: str, batch: list[list[int]], tokens: int) -> float:
    """Seconds from the first byte sent to the last stream's end, all at once; every stream gets all its tokens."""

    async def stream(http: aiohttp.ClientSession, ids: list[int]) -> int:
        body = {
            "model": "smollm2",
            "prompt": ids,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage = None
        async with http.post(f"{url}/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for data in events(reply):
                usage = (json.loads(data).get("usage") if data != "[DONE]" else None) or usage
        assert usage is not None
        return int(usage["completion_tokens"])

    async with aiohttp.ClientSession() as http:
        began = time.perf_counter()
        counts = await asyncio.gather(*(stream(http, ids) for ids in batch))
        seconds = time.perf_counter() - began
    assert set(counts) == {tokens}
    return seconds


def fresh(batch: list[list[int]], repetition: int) -> list[list[int]]:
    """The same prompts with their first token changed, so that no prefix cache serves a repetition."""
    return [[1000 + repetition, *ids[1:]] for ids in batch]


def run(quick: bool) -> Findings:
    """Ours and both baselines in turn, then twice more without the slower one; medians are compared."""
    repetitions, tokens = (1, 8) if quick else (3, 64)
    runs: list[dict[str, Any]] = []
    slower: dict[int, str] = {}  # streams → the dtype that is not its faster one, by the first repetition
    with serving(env={"INFERD_PREFIX_CACHE": "false"}) as daemon:
        batch = asyncio.run(prompts(daemon.url))
        asyncio.run(served(daemon.url, batch, 4))
        with baseline(DTYPES[0]) as first, baseline(DTYPES[1]) as second:
            machine = first.ask(measure=True)
            for repetition in range(repetitions):
                for size in (STREAMS, 1):
                    part = fresh(batch, repetition)[:size]
                    seconds = {"inferd": asyncio.run(served(daemon.url, part, tokens))}
                    for dtype, child in zip(DTYPES, (first, second), strict=True):
                        if dtype != slower.get(size):
                            seconds[dtype] = child.ask(prompts=part, tokens=tokens)["seconds"]
                    if size not in slower:
                        slower[size] = max(DTYPES, key=lambda dtype: seconds[dtype])
                    runs += [
                        {"who": who, "streams": size, "tokens_per_s": round(size * tokens / s, 2)}
                        for who, s in seconds.items()
                    ]
            parameters = first.facts["parameters"]
    manifest = Library(paths.cache_dir(), lambda *_: None).prepare("smollm2").manifest
    config = EngineConfig(model_dir="")
    return judged(runs, machine, parameters, host_facts(config, manifest).weights_bytes)


def judged(runs: list[dict[str, Any]], machine: dict[str, float], parameters: int, weights: int) -> Findings:
    """Medians, ratios and floors; `weights`: bytes of them as served here."""

    def median(who: str, streams: int) -> float:
        rates = sorted(r["tokens_per_s"] for r in runs if r["who"] == who and r["streams"] == streams)
        return float(rates[len(rates) // 2])

    ours = {size: median("inferd", size) for size in (STREAMS, 1)}
    best = {size: max(median(dtype, size) for dtype in DTYPES) for size in (STREAMS, 1)}
    reads_s = weights / machine["bandwidth_bytes_per_s"]
    computes_s = 2 * parameters * STREAMS / machine["gemm_flops_per_s"]
    limits = {1: 1 / reads_s, STREAMS: STREAMS / max(reads_s, computes_s)}
    summary: dict[str, float | int | str] = {}
    for size in (STREAMS, 1):
        summary[f"{size}: inferd (tokens/s)"] = ours[size]
        for dtype in DTYPES:
            summary[f"{size}: transformers {dtype} (tokens/s)"] = median(dtype, size)
        summary[f"{size}: inferd ÷ transformers' faster"] = round(ours[size] / best[size], 2)
        summary[f"{size}: share of the machine's limit"] = round(ours[size] / limits[size], 2)
    summary["weights as served (MB)"] = round(weights / 1e6, 1)
    summary["bandwidth (GB/s)"] = round(machine["bandwidth_bytes_per_s"] / 1e9, 1)
    summary["GEMM (GFLOP/s)"] = round(machine["gemm_flops_per_s"] / 1e9, 1)
    return Findings(
        runs=runs,
        summary=summary,
        met=ours[STREAMS] >= 1.5 * best[STREAMS] and ours[1] >= best[1],
        seeds=[SEED],
        notes=[
            "both sides read the same prompts of 64 tokens and make 64 tokens each; the time includes the prefill",
            "the limit: a decode step reads every weight once (one stream) or multiplies by it (16), nothing else",
        ],
    )
