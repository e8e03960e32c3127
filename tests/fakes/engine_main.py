"""An engine process without a model: the real process, loop, scheduler and wire around a FakeRunner.

`argv(...)` is what `EngineSession(argv=...)` wants. Faults are planted by options, so that each test says what goes
wrong. Torch-free: starts in about 0.2 s.
"""

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":  # run by path: the repository's root is not on the import path yet
    sys.path[0] = str(Path(__file__).parents[2])

from engine.budget import Limits, Resolved
from engine.config import EngineConfig
from engine.errors import CorruptModel, DoesNotFit, EngineFault, InferdError
from engine.plan import StepPlan, StepResult
from engine.process import Loaded, main
from tests.fakes.runner import FakeRunner

_LOAD_FAULTS: dict[str, type[InferdError]] = {"corrupt": CorruptModel, "fit": DoesNotFit, "engine": EngineFault}


def argv(**options: float | str) -> list[str]:
    """The command line of a fake engine: argv(step_s=0.01, die_at_step=5)."""
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, str(Path(__file__)), *words]


def fake_resolved(config: EngineConfig, kv_blocks: int = 1024, rows: int = 256) -> tuple[Resolved, Limits]:
    """Ceilings of a machine that does not exist."""
    names = (f for f in Resolved.__dataclass_fields__ if f != "reasons")
    resolved = Resolved(
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        threads=1,
        block_size=config.block_size,
        rows=min(rows, config.max_num_seqs or rows),
        step_tokens=config.max_num_batched_tokens or 2048,
        max_model_len=config.max_model_len or 4096,
        kv_blocks=kv_blocks,
        memory_limit_bytes=1 << 30,
        weights_bytes=1 << 20,
        kv_block_bytes=4096,
        workspace_bytes=0,
        activation_bytes=1 << 20,
        runtime_bytes=1 << 20,
        prefix_cache=config.prefix_cache,
        reasons=dict.fromkeys(names, "a fake"),
    )
    limits = Limits(
        max_num_seqs=resolved.rows,
        max_num_batched_tokens=resolved.step_tokens,
        prefill_chunk=min(512, resolved.step_tokens),
        max_partial_prefills=4,
        context_limit=resolved.max_model_len,
        kv_blocks=kv_blocks,
    )
    return resolved, limits


class FaultyRunner:
    """A FakeRunner that takes time and breaks where it is told to."""

    depth = 1

    def __init__(self, planted: argparse.Namespace, block_size: int = 16) -> None:
        self._inner = FakeRunner(block_size, oom=self._runs_out)
        self._planted = planted
        self._steps = 0  # that granted something
        self._tick: Callable[[str], None] = lambda phase: None

    def launch(self, plan: StepPlan) -> None:
        planted = self._planted
        if plan.slices:
            self._steps += 1
            if planted.die_at_step == self._steps:
                os.abort()
            if planted.memory_error_at_step == self._steps:
                raise MemoryError  # as from plan or commit: the device plane translates its own
            if planted.bad_alloc_at_step == self._steps:
                print("terminate called after throwing an instance of 'std::bad_alloc'", file=sys.stderr, flush=True)
                os.abort()
            if planted.hang_at_step == self._steps:
                self._hang(planted.hang_s or 3600)
            if planted.crawl_at_step == self._steps:
                self._crawl()
            while planted.spin_at_step == self._steps:
                pass
        self._inner.launch(plan)

    def _hang(self, seconds: float) -> None:
        """In C, where no other thread gets the interpreter; a signal only interrupts it."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ctypes.PyDLL(None).usleep(int(1e6 * left))

    def _crawl(self) -> None:
        """A step that takes long and says all the time that it moves."""
        for _ in range(int(self._planted.crawl_s / 0.05)):
            time.sleep(0.05)
            self._tick("forward")

    def tell(self, tick: Callable[[str], None]) -> None:
        self._tick = tick

    def _runs_out(self, plan: StepPlan) -> bool:
        """Whether this step is to run out of memory: once, from some step on, or because a row is too long."""
        planted, longest = self._planted, max((piece.start + piece.count for piece in plan.slices), default=0)
        return bool(
            (plan.slices and planted.oom_once_at_step == self._steps)
            or 0 < planted.oom_over_request_tokens < longest
            or 0 < planted.oom_from_step <= self._steps
        )

    def collect(self) -> StepResult:
        if self._planted.step_s:
            time.sleep(self._planted.step_s)
        return self._inner.collect()

    def close(self) -> None:
        time.sleep(self._planted.close_s)
        self._inner.close()


def load(planted: argparse.Namespace) -> Callable[[EngineConfig, Callable[[str, float], None]], Loaded]:
    def _load(config: EngineConfig, progress: Callable[[str, float], None]) -> Loaded:
        progress("fake weights", 0.5)
        time.sleep(planted.load_s)
        if planted.load_fault_once and not Path(planted.load_fault_once).exists():
            Path(planted.load_fault_once).touch()  # the first start is well, the second is not, the third is again
        elif planted.load_fault_once and Path(planted.load_fault_once).stat().st_size == 0:
            Path(planted.load_fault_once).write_text("done")
            raise DoesNotFit("a neighbour holds the memory", "wait")
        if planted.load_fault == "abort":
            os.abort()
        if planted.load_fault == "bug":
            raise RuntimeError("planted while loading")
        if planted.load_fault:
            raise _LOAD_FAULTS[planted.load_fault]("planted while loading", "do not plant it")
        resolved, limits = fake_resolved(config, planted.kv_blocks, planted.rows)
        runner = FaultyRunner(planted, config.block_size)
        return Loaded(resolved=resolved, limits=limits, runner=runner, phases={"weights": 1}, cache_root="fake")

    return _load


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Faults and figures from a command line; None = this process's own."""
    parser = argparse.ArgumentParser()
    for name in ("step-s", "load-s", "close-s", "hang-s", "crawl-s"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    for name in (
        "die-at-step",
        "memory-error-at-step",
        "bad-alloc-at-step",
        "hang-at-step",
        "crawl-at-step",
        "spin-at-step",
        "oom-over-request-tokens",
        "oom-once-at-step",
        "oom-from-step",
    ):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--kv-blocks", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--load-fault", default="")
    parser.add_argument("--load-fault-once", default="", help="a file that remembers how often it was started")
    return parser.parse_args(words)


if __name__ == "__main__":
    main(load(options()))
