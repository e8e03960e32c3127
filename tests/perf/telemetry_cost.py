"""What telemetry costs: an event its publisher, a run its own CPU time, a server its throughput.

The whole of it (detail traces to a receiver on loopback, journal, recorder, exemplars) against none of it, two daemons
at once and asked in turn, so that a neighbour's noise hits both.
"""

import asyncio
import json
import math
import random
import statistics
import struct
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from telemetry import events
from telemetry.bus import Bus
from telemetry.exposition import Exposition
from telemetry.fold import Fold
from telemetry.recorder import Recorder
from tests.fakes.collector import Collector
from tests.perf.harness import Findings
from tests.perf.http_throughput import prompts, served
from tests.served import Served

TITLE = "Telemetry: its own CPU time, its effect on throughput, the cost of an event"
PROMISE = (
    "own CPU ≤ 1 % of the run's; throughput on/off ≥ 0.97 (lower bound, 95 %); "
    "an event of up to 256 bytes ≤ 3 µs, a StepReport of 256 rows ≤ 15 µs"
)
SEED = 11
ROWS = 256
STREAMS = 8
ROUNDS, TOKENS = 40, 64
BUDGET_S = 180.0  # for the rounds: a slow machine makes fewer, and its interval is wider


def _small() -> events.Event:
    return events.FirstToken(at_ns=10**15, request_id="chatcmpl-" + "0" * 32, ttft_ns=10**8, trace_id="0" * 32)


def _report() -> events.Event:
    chance = random.Random(SEED)
    return events.StepReport(
        at_ns=10**15,
        step=10**6,
        plan_ns=400_000,
        launch_ns=300_000,
        collect_ns=20_000_000,
        commit_ns=300_000,
        decode_rows=ROWS,
        decode_tokens=ROWS,
        running=ROWS,
        kv_active=9000,
        rows=struct.pack(f"<{3 * ROWS}i", *(n for row in range(ROWS) for n in (row, chance.randrange(4000), 1))),
        gaps_us=struct.pack(f"<{ROWS}I", *(round(chance.gauss(21_000, 300)) for _ in range(ROWS))),
    )


def _microseconds(work: Callable[[], object], times: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(times):
        work()
    return (time.perf_counter_ns() - begin) / times / 1000


def _round(directory: Path, times: int) -> dict[str, float]:
    small, report, fold = _small(), _report(), Fold("model")
    with Recorder.open(directory / "ring", "perf") as recorder:
        bus = Bus(recorder, {"fold": lambda batch: None}, queue_events=4 * times)
        figures = {
            "small_event_us": _microseconds(lambda: bus.publish(small), times),
            "step_report_us": _microseconds(lambda: bus.publish(report), times),
        }
        bus.close()
    exposition = Exposition(fold)
    figures["fold_small_us"] = _microseconds(lambda: fold.take([small]), times)
    figures["fold_step_report_us"] = _microseconds(lambda: fold.take([report]), times // 10)
    figures["scrape_ms"] = _microseconds(exposition.render, 3) / 1000
    return figures


def micro(rounds: int, times: int) -> list[dict[str, float]]:
    with TemporaryDirectory() as directory:
        return [_round(Path(directory), times) for _ in range(rounds)]


def best_of(runs: list[dict[str, float]]) -> dict[str, float]:
    """The best figure of each: the others measure the neighbours."""
    return {name: round(min(run[name] for run in runs), 2) for name in runs[0]}


def _environ(collector: Collector) -> dict[str, str]:
    """Sent there, at the pace and interval that are everybody's default."""
    return {name: value for name, value in collector.environ("http/protobuf").items() if "EXPORTER" in name}


class Sides:
    """Two daemons on the same model: `whole` with everything on, `bare` with nothing."""

    def __init__(self, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="inferd-perf-")))
        collector = stack.enter_context(Collector())
        self.whole = Served(folder / "whole", "smollm2", env=_environ(collector))
        self.bare = Served(folder / "bare", "smollm2", command=[sys.executable, "-m", "tests.perf.bare_daemon"])
        for daemon in (self.whole, self.bare):
            stack.enter_context(daemon)
        status, _ = self.whole.control("/inferd/v1/trace-level", "POST", {"level": "detail"})
        assert status == 200
        self.batch = asyncio.run(prompts(self.whole.url))[:STREAMS]

    def round(self, index: int, tokens: int) -> dict[str, float]:
        """Tokens a second of both; who is first takes turns."""
        order = ("whole", "bare") if index % 2 else ("bare", "whole")
        return {
            name: STREAMS * tokens / asyncio.run(served(getattr(self, name).url, self.batch, tokens)) for name in order
        }


class Meter:
    """CPU time of a daemon with its engine, and of their telemetry, from now on."""

    def __init__(self, daemon: Served, event_us: float) -> None:
        self._daemon = daemon
        self._event_us = event_us
        self._before = self._now()

    def ratio(self) -> tuple[float, dict[str, float]]:
        """Telemetry's share of the CPU time, and its parts in ms."""
        spent = {name: value - self._before.get(name, 0.0) for name, value in self._now().items()}
        total = spent.pop("total")
        return sum(spent.values()) / total, {name: round(s * 1000, 1) for name, s in spent.items()}

    def _now(self) -> dict[str, float]:
        """Seconds. Sinks and receiver: CPU time of their threads. The engine's publishing and the API's: their events
        by the cost of one, as neither has a thread of its own; the engine's also by its own account, wall time."""
        found = {"total": 0.0}
        for pid in (self._daemon.pid, self._daemon.engine_pid()):
            for task in Path(f"/proc/{pid}/task").iterdir():
                seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
                found["total"] += seconds
                name = (task / "comm").read_text().strip()
                if name.startswith("tel-"):
                    found[name] = found.get(name, 0.0) + seconds
        figures = {}
        for line in self._daemon.get("/metrics")[1].decode().splitlines():
            name, _, value = line.rpartition(" ")
            figures[name.replace('engine="0",', "").replace(',model="smollm2"', "").replace('model="smollm2",', "")] = (
                value
            )
        found["engine-publish"] = float(figures['inferd_step_seconds_sum{phase="publish"}'])
        ended = sum(float(v) for name, v in figures.items() if name.startswith("inferd_requests_finished_total"))
        found["api-publish"] = 2 * ended * self._event_us / 1e6
        return found


def interval(ratios: list[float]) -> tuple[float, float]:
    """The geometric mean and the lower end of its 95 % interval (normal; the rounds are many)."""
    logs = [math.log(ratio) for ratio in ratios]
    spread = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return math.exp(statistics.fmean(logs)), math.exp(statistics.fmean(logs) - spread)


def run(quick: bool) -> Findings:
    """Rounds of STREAMS streams on both sides, between two halves of the microbenchmarks: a machine that is slow for a
    minute is not slow in both."""
    half = (1, 200) if quick else (8, 4000)
    micro_runs = micro(*half)
    best = best_of(micro_runs)
    rounds, tokens = (2, 8) if quick else (ROUNDS, TOKENS)
    with ExitStack() as stack:
        sides = Sides(stack)
        sides.round(0, tokens)  # warm
        meter = Meter(sides.whole, best["small_event_us"])
        until = time.monotonic() + BUDGET_S
        pairs: list[dict[str, float]] = []
        while len(pairs) < 2 or (len(pairs) < rounds and time.monotonic() < until):
            pairs.append(sides.round(len(pairs), tokens))
        share, parts = meter.ratio()
    micro_runs += micro(*half)
    best = best_of(micro_runs)
    mean, low = interval([pair["whole"] / pair["bare"] for pair in pairs])
    return Findings(
        runs=[*micro_runs, *pairs],
        summary={
            **best,
            "small_event_bytes": len(events.encode(_small())),
            "step_report_bytes": len(events.encode(_report())),
            "scrape_bytes": len(Exposition(Fold("model")).render()[0]),
            "own_cpu_percent": round(100 * share, 3),
            "own_cpu_parts_ms": json.dumps(parts),
            "throughput_ratio": round(mean, 4),
            "throughput_ratio_low": round(low, 4),
        },
        met=best["small_event_us"] <= 3 and best["step_report_us"] <= 15 and share <= 0.01 and low >= 0.97,
        seeds=[SEED],
        notes=[
            "events: best of the rounds, encoding and ring included, with one sink's queue, without what the sink does",
            f"{len(pairs)} rounds of {STREAMS} streams of {tokens} tokens a side, in turn; the interval is theirs",
            "off: no recorder, journal, bundles, traces, exemplars; /metrics and the event feed are on both sides",
        ],
    )
