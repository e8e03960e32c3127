"""The tuner against static limits, live: a mixture, 24 users."""

from autotune.workload import MIXES
from tests.perf.harness import Findings
from tests.perf.live_load import Load
from tests.perf.tuner_grid import MEMORY, PROMISE, Times, measured

__all__ = ["PROMISE"]

WARM = Times(warm_s=30.0, laps=5)  # until the first prompts are read
TITLE = f"The tuner against static limits: a mixture, 24 users, {MEMORY}"


def run(quick: bool) -> Findings:
    return measured(Load(mix=MIXES["mixed"], seed=13, users=24), quick, WARM)
