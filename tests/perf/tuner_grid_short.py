"""The tuner against static limits, live: short prompts, 80 users."""

from autotune.workload import MIXES
from tests.perf.harness import Findings
from tests.perf.live_load import Load
from tests.perf.tuner_grid import PROMISE, measured

__all__ = ["PROMISE"]

MEMORY = "1000MiB"  # of which 64 such requests would fill three quarters
TITLE = f"The tuner against static limits: short prompts, 80 users, {MEMORY}"


def run(quick: bool) -> Findings:
    return measured(Load(mix=MIXES["short"], seed=11, users=80), quick, memory=MEMORY)
