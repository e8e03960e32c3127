"""Questions to the simulator: how would this engine do under that load, at twice of it, on so many replicas?

Owns the calibration a question needs and the figures of an answer. Pure but for the time it takes. Enter at `ask` and
`replicas`; `against` compares an answer with what a live run recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autotune.objective import Targets
from autotune.simulate import Outcome, Simulation, Steering
from autotune.watch import samples_of
from autotune.window import Cells
from autotune.workload import Job, Replay, Traffic
from engine.budget import Limits, Resolved
from engine.stepcost import CostFit, StepCost
from telemetry.events import RequestRecord, StepReport

ATTAINED = 0.95  # of the requests have to count for a number of replicas to be enough
MOST_REPLICAS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One engine on one machine: its ceilings, its limits, what its steps cost and how wrong that is on average."""

    resolved: Resolved
    limits: Limits
    cost: StepCost
    error: float
    source: str


def fitted(reports: Sequence[StepReport]) -> CostFit:
    """The cost of a step as these reports show it."""
    fit = CostFit()
    for sample in samples_of(reports):
        fit.learn(sample.shape, sample.seconds * 1e9)
    return fit


def ask(
    calibration: Calibration,
    traffic: Traffic,
    *,
    seconds: float,
    targets: Targets,
    warm_s: float = 0.0,
    tuner: Callable[[], Steering] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """The figures of one run: rates in tokens per second, latencies in seconds."""
    simulation = Simulation(
        calibration.resolved,
        calibration.limits,
        calibration.cost,
        traffic,
        targets=targets,
        tuner=tuner() if tuner else None,
        seed=seed,
        scored_from_s=warm_s,
    )
    outcome = simulation.run(warm_s + seconds)
    return {**figures(outcome), "limits": asdict(simulation.limits)}


def figures(outcome: Outcome) -> dict[str, Any]:
    busy = outcome.busy_s or 1.0
    return {
        "seconds": round(outcome.seconds, 3),
        "offered": outcome.offered,
        "finished": outcome.finished,
        "shed": outcome.shed + outcome.refused,
        "truncated": outcome.truncated,
        "attained": round(outcome.attained, 4),
        "goodput": round(outcome.goodput, 2),
        "output_tokens_per_s": round(outcome.output_tokens / outcome.seconds if outcome.seconds else 0.0, 2),
        "ttft_p50": outcome.ttft.percentile(50),
        "ttft_p95": outcome.ttft.percentile(95),
        "inter_token_p50": outcome.gaps.percentile(50),
        "inter_token_p95": outcome.gaps.percentile(95),
        "latency_p95": outcome.latency.percentile(95),
        "preemptions": outcome.preemptions,
        "kv_peak_blocks": outcome.kv_peak,
        "over_watermark_share": round(outcome.over_watermark_s / busy, 4),
        "utilisation": round(outcome.busy_s / outcome.seconds if outcome.seconds else 0.0, 4),
        "steps": outcome.steps,
        "planned_steps": outcome.planned_steps,
    }


def replicas(
    calibration: Calibration, jobs: list[Job], *, times: float, targets: Targets, most: int = MOST_REPLICAS
) -> list[dict[str, Any]]:
    """One row per number of replicas tried, the last of which is enough; or `most` was not. One replica is simulated:
    its share of the requests, taken in turns."""
    rows = []
    whole = Replay(jobs, times)
    seconds = jobs[-1].at_s / times if jobs else 0.0
    count = 1
    while True:
        row = ask(calibration, whole.share(count), seconds=seconds + 1e-3, targets=targets)
        enough = row["attained"] >= ATTAINED and row["finished"] >= 0.95 * row["offered"]
        rows.append({"replicas": count, "enough": enough, **row})
        if enough or count >= most:
            return rows
        count = min(most, max(count + 1, round(count * 1.25)))


def against(answer: dict[str, Any], records: Sequence[RequestRecord], targets: Targets) -> dict[str, dict[str, float]]:
    """Simulated beside recorded, and the relative error of each figure."""
    served = [r for r in records if r.output_tokens and r.first_token_ns]
    if not served:
        return {}
    began, ended = min(r.arrival_ns for r in served), max(r.at_ns for r in served)
    ttft, latency, good_tokens, tokens = Cells(), Cells(), 0, 0
    for r in served:
        first_s = (r.first_token_ns - r.arrival_ns) / 1e9
        ttft.add(first_s)
        latency.add((r.at_ns - r.arrival_ns) / 1e9)
        tokens += r.output_tokens
        gap_s = (r.last_token_ns - r.first_token_ns) / 1e9 / max(1, r.output_tokens - 1)
        good_tokens += r.output_tokens if targets.met(first_s, gap_s) else 0
    seconds = (ended - began) / 1e9 or 1.0
    live = {
        "goodput": good_tokens / seconds,
        "output_tokens_per_s": tokens / seconds,
        "ttft_p50": ttft.percentile(50) or 0.0,
        "ttft_p95": ttft.percentile(95) or 0.0,
        "latency_p95": latency.percentile(95) or 0.0,
    }
    found = {}
    for name, value in live.items():
        simulated = answer[name] or 0.0
        found[name] = {"simulated": simulated, "live": value, "error": abs(simulated - value) / value if value else 0.0}
    return found
