"""The simulator, calibrated by one load at one setting, against live runs at others."""

from dataclasses import asdict
from typing import Any

from autotune.workload import MIXES
from tests.perf.harness import Findings
from tests.perf.live_load import Load, calibrated, drive, figures_of, like, limits_of, simulated, steer
from tests.perf.served import Served, serving

TITLE = "Simulated against live goodput"
PROMISE = "off by at most 20 % at settings and loads that it was not calibrated by"
SEED = 5
CALIBRATION = Load(mix=MIXES["mixed"], seed=SEED + 9, users=16)
CALIBRATION_ROWS = (3, 12)  # at one number of rows, nothing tells what another would cost
# Name, load, rows
CASES = (
    ("short, 16 users, 8 rows", Load(mix=MIXES["short"], seed=SEED, users=16), 8),
    ("short, 16 users, 2 rows", Load(mix=MIXES["short"], seed=SEED + 1, users=16), 2),
    ("short, 16 users, 16 rows", Load(mix=MIXES["short"], seed=SEED + 2, users=16), 16),
    ("mixed, 8 users, 4 rows", Load(mix=MIXES["mixed"], seed=SEED + 3, users=8), 4),
    ("shared, 12 users, 12 rows", Load(mix=MIXES["shared"], seed=SEED + 4, users=12), 12),
)


def run(quick: bool) -> Findings:
    with serving() as served:
        return compared(served, quick)


def compared(served: Served, quick: bool) -> Findings:
    """Each case live, then simulated by what the tuner had learned before it. The tuner, frozen, changes nothing."""
    calibrating_s, seconds, cases = (20.0, 30.0, CASES[:1]) if quick else (30.0, 75.0, CASES)
    runs: list[dict[str, Any]] = []
    steer(served, freeze=True)
    for rows in CALIBRATION_ROWS:
        steer(served, set={"max_num_seqs": rows}, why="a calibration")
        drive(served, CALIBRATION, calibrating_s)
    for name, load, rows in cases:
        known = calibrated(served)
        steer(served, set={"max_num_seqs": rows}, why="a measurement")
        ran = drive(served, load, seconds)
        warm_s = seconds / 4
        traffic = like(load, known.resolved.max_model_len, ran.served)
        forecast = figures_of(simulated(known, limits_of(served), traffic, seconds, warm_s))
        live = ran.figures(warm_s)
        error = abs(forecast["goodput"] - live["goodput"]) / live["goodput"] if live["goodput"] else 1.0
        cost = {"step_cost": asdict(known.cost), "step_cost_error": known.error}
        runs.append({"case": name, "live": live, "simulated": forecast, "error": error, **cost})
        _table(runs[-1])
    worst = max(r["error"] for r in runs)
    return Findings(
        runs=runs,
        summary={
            **{f"{r['case']}: live / simulated": f"{_pair(r, 'goodput')}, off by {r['error']:.0%}" for r in runs},
            "worst error": f"{worst:.1%}",
            "a step is predicted to": f"{runs[-1]['step_cost_error']:.1%}",
        },
        met=worst <= 0.2,
        seeds=[load.seed for _, load, _ in cases],
        notes=["goodput without targets: output tokens per second of requests that ended, after a quarter of the run"],
    )


def _pair(run: dict[str, Any], figure: str) -> str:
    return f"{run['live'][figure]:.4g} / {run['simulated'][figure]:.4g}"


def _table(run: dict[str, Any]) -> None:
    """As it goes: where a forecast is wrong, one of these is, too."""
    print(f"{run['case']}, live / simulated:")
    for figure in run["live"]:
        print(f"  {figure:<42}{_pair(run, figure)}", flush=True)
