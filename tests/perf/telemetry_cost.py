"""What an event costs its publisher, the fold and the scrape."""

import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from telemetry import events
from telemetry.bus import Bus
from telemetry.exposition import Exposition
from telemetry.fold import Fold
from telemetry.recorder import Recorder
from tests.perf.harness import Findings

TITLE = "Telemetry: cost of an event, of folding it, and of a scrape"
PROMISE = "publishing an event of up to 256 bytes ≤ 3 µs, a StepReport of 256 rows ≤ 15 µs, encoding and ring included"
SEED = 11
ROWS = 256


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


def run(quick: bool) -> Findings:
    """Several rounds; the promise is about the best, because the others measure the neighbours."""
    rounds, times = (2, 200) if quick else (15, 4000)
    with TemporaryDirectory() as directory:
        runs = [_round(Path(directory), times) for _ in range(rounds)]
    best = {name: round(min(run[name] for run in runs), 2) for name in runs[0]}
    return Findings(
        runs=runs,
        summary={
            **best,
            "small_event_bytes": len(events.encode(_small())),
            "step_report_bytes": len(events.encode(_report())),
            "scrape_bytes": len(Exposition(Fold("model")).render()[0]),
        },
        met=best["small_event_us"] <= 3 and best["step_report_us"] <= 15,
        seeds=[SEED],
        notes=["best of the rounds; with one sink's queue, without what the sink does"],
    )
