"""What each optimisation is worth on the default model: `inferd bench ablate`, every feature off alone and all off."""

from typing import Any

import msgspec

from daemon.lab.ablate import Ablation, ablated
from daemon.lab.record import Report
from tests.perf.harness import Findings

TITLE = "Ablation: every optimisation off alone, default model, 8 at a time"
PROMISE = "every request succeeds, and no feature that is switched off gives significantly more throughput"
SEED = 40
_SHOWN = ("output_tokens_per_s", "ttft_p95_s", "inter_token_p95_s", "peak_in_use_bytes", "peak_engine_bytes")


def run(quick: bool) -> Findings:
    """40 runs in turns, each on a daemon of its own; quick: three sides, once."""
    asked = Ablation(
        model="smollm2",
        features=("paged-kv", "fast-attention") if quick else (),
        alone=False,
        requests=3 if quick else 40,
        concurrency=8,
        repeats=1 if quick else 5,
        seed=SEED,
        longest=256 if quick else 768,
        rows=8,
        memory_limit="2GiB",
    )
    return judged(ablated(asked))


def judged(report: Report) -> Findings:
    """Ratios with their intervals; one run says nothing about noise."""
    summary: dict[str, float | int | str] = {}
    for effect in report.effects:
        if effect.figure in _SHOWN:
            interval = "" if effect.low is None else f" ({effect.low:.2f} to {effect.high:.2f})"
            noise = "" if effect.noise is False else ", not significant"
            summary[f"{effect.side}: {effect.figure} ÷ {effect.against}"] = f"{effect.ratio:.2f}{interval}{noise}"
    failed = sum(run.figures["failed"] for run in report.runs)
    gained = [e for e in report.effects if e.figure == _SHOWN[0] and e.noise is False and e.ratio > 1]
    runs: list[dict[str, Any]] = [
        {"side": run.side, "repeat": run.repeat, "seconds": run.seconds, **run.figures} for run in report.runs
    ]
    return Findings(
        runs=runs,
        summary={**summary, "failed": failed},
        met=failed == 0 and not gained,
        seeds=list(report.seeds),
        notes=[*report.notes, f"settings: {msgspec.json.encode(report.settings).decode()}"],
    )
