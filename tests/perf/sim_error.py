"""The simulator, calibrated by one load at one setting, against live runs at others."""

from typing import Any

from autotune.workload import MIXES
from tests.perf.harness import Findings
from tests.perf.live_load import Load, calibrated, drive, like, limits_of, simulated, steer
from tests.perf.served import serving

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
    """Each case live, then simulated. The tuner learns but, frozen, changes nothing."""
    seconds, cases = (30.0, CASES[:1]) if quick else (45.0, CASES)
    runs: list[dict[str, Any]] = []
    with serving() as served:
        steer(served, freeze=True)
        for rows in CALIBRATION_ROWS:
            steer(served, set={"max_num_seqs": rows}, why="a calibration")
            drive(served, CALIBRATION, seconds / 1.5)
        known = calibrated(served)
        for name, load, rows in cases:
            steer(served, set={"max_num_seqs": rows}, why="a measurement")
            ran = drive(served, load, seconds)
            warm_s = seconds / 4
            live = ran.tokens_per_s(warm_s)
            traffic = like(load, known.resolved.max_model_len, ran.served)
            forecast = simulated(known, limits_of(served), traffic, seconds, warm_s)
            runs.append({"case": name, "live": live, "simulated": forecast, "error": abs(forecast - live) / live})
    worst = max(r["error"] for r in runs)
    return Findings(
        runs=runs,
        summary={
            **{f"{r['case']}: live / simulated": f"{r['live']:.1f} / {r['simulated']:.1f}" for r in runs},
            "worst error": f"{worst:.1%}",
            "a step is predicted to": f"{known.error:.1%}",
        },
        met=worst <= 0.2,
        seeds=[load.seed for _, load, _ in cases],
        notes=["goodput without targets: output tokens per second of requests that ended, after a quarter of the run"],
    )
