"""The tuner against static limits, live: a load that switches every minute."""

from autotune.workload import MIXES
from tests.perf.harness import Findings
from tests.perf.live_load import Load
from tests.perf.tuner_grid import MEMORY, PROMISE, Times, measured

__all__ = ["PROMISE"]

TITLE = f"The tuner against static limits: a load that switches every minute, {MEMORY}"


def run(quick: bool) -> Findings:
    """Scored over whole turns of the load, two minutes each."""
    times = Times(warm_s=60.0, scored_s=120.0, laps=4, scored_laps=2)
    return measured(Load(mix=MIXES["short"], seed=14, rate=2.0, arrival="switching"), quick, times)
