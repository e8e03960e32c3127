"""The tuner against static limits, live: a load that switches every minute."""

from autotune.workload import MIXES
from tests.perf.harness import Findings
from tests.perf.live_load import Load
from tests.perf.tuner_grid import MEMORY, PROMISE, Times, measured

__all__ = ["PROMISE"]

TITLE = f"The tuner against static limits: a load that switches every minute, {MEMORY}"
# A lap is a calm minute and a busy one.
TURNS = Times(warm_s=0.0, scored_s=120.0, laps=5, scored_laps=2, around=False)


def run(quick: bool) -> Findings:
    return measured(Load(mix=MIXES["short"], seed=14, rate=2.0, arrival="switching"), quick, TURNS)
