"""The tuner against a grid of static limits, in the simulator: `python -m tests.perf.tuner_grid [LEARNED]`.

24 static settings on each load, then the tuner from the default limits and from limits 8 times too low, scored over the
last third. LEARNED names an entry of what a daemon's tuner learned ($STATE_DIRECTORY/tuner.json), so that the figures
24 static settings on each load, then the tuner from the default limits and from ones 8 times too low, scored over the
and the tuner's share of the best.
"""

import itertools
import statistics
import sys
from pathlib import Path

from autotune.online import Tuner
from autotune.simulate import Simulation
from autotune.space import Space
from autotune.whatif import Calibration
from autotune.workload import Synthetic, synthetic
from daemon.lab.calibrate import calibration
from daemon.paths import state_dir
from engine.budget import Limits
from tests.autotune.engines import COST, begins, engine

SECONDS, SCORED = 900.0, 300.0
LOADS = {
    "short, 48 users": ("short", 0.0, 48),
    "long, 12 users": ("long", 0.0, 12),
    "mixed, 24 users": ("mixed", 0.0, 24),
    "switching every minute": ("lognormal", 0.8, 0),
}


def of(learned: str) -> Calibration:
    if learned:
        return calibration("", "", "", Path(state_dir()), learned)
    resolved = engine()
    return Calibration(resolved=resolved, limits=begins(resolved), cost=COST, error=0.0, source="the tests' engine")


def traffic(lengths: str, rate: float, users: int, longest: int) -> Synthetic:
    return synthetic(lengths, seed=11, arrival="switching", rate=rate, users=users, longest=longest)


def goodput(known: Calibration, limits: Limits, load: tuple[str, float, int], tuner: Tuner | None = None) -> float:
    arriving = traffic(*load, known.resolved.max_model_len)
    simulation = Simulation(
        known.resolved, limits, known.cost, arriving, tuner=tuner, seed=11, scored_from_s=SECONDS - SCORED
    )
    return simulation.run(SECONDS).goodput


def main() -> None:
    known = of(sys.argv[1] if len(sys.argv) > 1 else "")
    space, ceiling = Space.of(known.resolved), known.resolved.ceilings()
    start = space.start(known.limits)
    rows = sorted({max(1, ceiling["max_num_seqs"] * share // 64) for share in (1, 4, 8, 16, 32, 64)})
    chunks = sorted({max(1, ceiling["prefill_chunk"] * share // 32) for share in (1, 4, 12, 32)})
    low = {"max_num_seqs": 8, "prefill_chunk": 8, "max_num_batched_tokens": 8, "max_partial_prefills": 8}
    wrong = start.replaced({name: max(1, getattr(start, name) // by) for name, by in low.items()})
    print(f"calibrated by {known.source}")
    for name, load in LOADS.items():
        grid = sorted(
            goodput(known, start.replaced({"max_num_seqs": n, "prefill_chunk": c}), load)
            for n, c in itertools.product(rows, chunks)
        )
        worst, best = statistics.median(grid[: max(1, len(grid) // 4)]), grid[-1]
        tuned = [goodput(known, limits, load, Tuner(space)) for limits in (start, wrong)]
        print(
            f"{name:<24} best {best:7.1f}  worst quartile {worst:7.1f}  ratio {best / worst:4.2f}  "
            f"tuner {tuned[0] / best:4.0%} of the best from the defaults, {tuned[1] / best:4.0%} from 8 x too low",
            flush=True,
        )


if __name__ == "__main__":
    main()
