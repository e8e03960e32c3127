"""`inferd` on a device of known speed: the real daemon, wire, engine process and scheduler around a runner that
computes nothing and takes the time that a cost model says. What it does live can be compared with the simulator on a
machine that is busy with other things, since a step that sleeps needs no processor.

Run as a module it is `inferd`; with `--engine` first it is the engine process that this one starts.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # the engine is run by path: the repository's root is not on the import path yet
    sys.path[0] = str(Path(__file__).parents[2])

from engine.config import EngineConfig
from engine.plan import RowInit, StepPlan, StepResult
from engine.process import Loaded
from engine.process import main as engine_main
from engine.stepcost import StepCost, StepShape
from tests.fakes.engine_main import fake_resolved
from tests.fakes.runner import FakeRunner

# About a small model on two cores: a decode-only step of 8 rows takes 0.08 s, a chunk of 64 tokens as much again.
COST = StepCost(fixed_s=0.04, prefill_s=0.0012, row_s=0.004, context_s=2e-6, pair_s=4e-7, crowd_s=8e-5)
_MIB = 1 << 20


class PacedRunner:
    """A FakeRunner whose steps last as long as `COST` says from their launch, and whose answers as long as asked."""

    depth = 1

    def __init__(self, block_size: int) -> None:
        self._inner = FakeRunner(block_size)
        self._due_s = 0.0

    def launch(self, plan: StepPlan) -> None:
        self._due_s = time.monotonic() + (COST.seconds(StepShape.of(plan)) if plan.slices else 0.0)
        self._inner.launch(replace(plan, admitted=tuple(map(_endless, plan.admitted))) if plan.admitted else plan)

    def collect(self) -> StepResult:
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        return self._inner.collect()

    def tell(self, tick: Callable[[str], None]) -> None:
        """Its steps are short."""

    def close(self) -> None:
        self._inner.close()


def _endless(init: RowInit) -> RowInit:
    """With no stop token before the most that was asked for."""
    return replace(init, sampling=replace(init.sampling, min_tokens=init.sampling.max_tokens))


def load(config: EngineConfig, progress: Callable[[str, float], None]) -> Loaded:
    """64 rows, 512 tokens a step, 1,140 blocks: at long prompts memory binds."""
    resolved, limits = fake_resolved(config, kv_blocks=1140, rows=64)
    resolved = replace(
        resolved,
        step_tokens=512,
        memory_limit_bytes=2048 * _MIB,
        weights_bytes=621 * _MIB,
        kv_block_bytes=737280,
        activation_bytes=177 * _MIB,
        runtime_bytes=345 * _MIB,
        context_doubling=3072,
    )
    limits = replace(limits, max_num_batched_tokens=512, prefill_chunk=64, max_partial_prefills=4)
    return Loaded(
        resolved=resolved,
        limits=limits,
        runner=PacedRunner(config.block_size),
        phases={"weights": 1},
        cache_root="fake",
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        engine_main(load)
    import daemon.session
    from daemon.cli import main
    from daemon.session import EngineSession

    engine = [sys.executable, str(Path(__file__)), "--engine"]
    daemon.session.EngineSession = partial(EngineSession, argv=engine)  # type: ignore[assignment, misc]
    sys.argv[0] = "inferd"
    sys.exit(main())
