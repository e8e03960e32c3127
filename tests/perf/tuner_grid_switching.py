"""The tuner against static limits, live: a load that switches every minute."""

from autotune.workload import MIXES
from tests.perf.harness import Findings
from tests.perf.live_load import Load
from tests.perf.tuner_grid import MEMORY, PROMISE, measured

__all__ = ["PROMISE"]

TITLE = f"The tuner against static limits: a load that switches every minute, {MEMORY}"


def run(quick: bool) -> Findings:
    return measured(Load(mix=MIXES["short"], seed=14, rate=2.0, arrival="switching"), quick)
