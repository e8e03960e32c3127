"""The tuner against static limits, live: long prompts, 12 users."""

from autotune.workload import MIXES
from tests.perf.harness import Findings
from tests.perf.live_load import Load
from tests.perf.tuner_grid import MEMORY, PROMISE, Times, measured

__all__ = ["PROMISE"]

WARM = Times(warm_s=30.0, laps=5)  # until the first prompts are read
TITLE = f"The tuner against static limits: long prompts, 12 users, {MEMORY}"


def run(quick: bool) -> Findings:
    return measured(Load(mix=MIXES["long"], seed=12, users=12), quick, WARM)
