"""500 hours of random load under the tuner, in the simulator: some six minutes."""

from typing import Any

from tests.autotune import promises
from tests.perf.harness import Findings

TITLE = "Simulated hours of random load under the tuner"
PROMISE = "no promise of tests/autotune/promises.py is broken in any hour"
FIRST_SEED = 1000  # not those of the tests
HOURS = 500


def run(quick: bool) -> Findings:
    """One hour a seed: the hard line, the watermark, bounds, changes an hour, one change at a time, rollbacks."""
    runs: list[dict[str, Any]] = []
    for seed in range(FIRST_SEED, FIRST_SEED + (8 if quick else HOURS)):
        hour = promises.hour(seed)
        outcome = hour.outcome
        runs.append(
            {
                "seed": seed,
                "broken": promises.broken(hour),
                "changes": hour.tuner.changes,
                "over_watermark": outcome.over_watermark_s / (outcome.busy_s or 1.0),
                "past_hard_line": outcome.past_hard_line,
                "finished": outcome.finished,
            }
        )
    broken = [r for r in runs if r["broken"]]
    return Findings(
        runs=runs,
        summary={
            "simulated hours": len(runs),
            "hours that broke a promise": len(broken),
            "steps past the hard line": sum(r["past_hard_line"] for r in runs),
            "worst share of the time above the watermark": f"{max(r['over_watermark'] for r in runs):.2%}",
            "changes an hour, mean": round(sum(r["changes"] for r in runs) / len(runs), 1),
            "requests served": sum(r["finished"] for r in runs),
        },
        met=not broken,
        seeds=[r["seed"] for r in runs],
        notes=[f"seed {r['seed']}: {'; '.join(r['broken'])}" for r in broken],
    )
