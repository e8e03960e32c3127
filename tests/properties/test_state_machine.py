"""A hypothesis state machine over Scheduler, BlockPool and a fake device: whatever happens, in whatever order, the
promises of tests/fakes/world.py hold. And it is no blunt tool: five planted bugs are each caught by it."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from engine import policy
from engine.features import Chunked
from engine.kv.pool import BlockPool
from engine.scheduler import Scheduler
from tests.fakes.world import World

STEPS = 20_000
_SETTINGS = settings(
    max_examples=320,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

_SHAPES = st.fixed_dictionaries(
    {
        "rows": st.sampled_from([1, 2, 4, 8]),
        "kv_blocks": st.sampled_from([3, 8, 12, 40]),
        "block_size": st.sampled_from([1, 2, 4]),
        "step_tokens": st.sampled_from([1, 2, 3, 8, 64]),
        "max_model_len": st.sampled_from([20, 60]),
        "prefix_cache": st.booleans(),
    }
)
_PROMPTS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=24).map(tuple)


class EngineMachine(RuleBasedStateMachine):
    """What clients, readers, an operator and a tight memory may do, in any order."""

    total_steps = 0

    @initialize(shape=_SHAPES, patience=st.sampled_from([3, 1 << 30]))
    def begin(self, shape: dict[str, Any], patience: int) -> None:
        self.world = World(shape, patience)

    @rule(
        prompt=_PROMPTS,
        tokens=st.integers(1, 40),
        choices=st.sampled_from([1, 1, 1, 3]),
        temperature=st.sampled_from([0.0, 1.0]),
        priority=st.sampled_from([0, 0, 1]),
        stops=st.sampled_from([(), tuple(range(60))]),
        min_tokens=st.sampled_from([0, 2]),
    )
    def ask(
        self,
        prompt: tuple[int, ...],
        tokens: int,
        choices: int,
        temperature: float,
        priority: int,
        stops: tuple[int, ...],
        min_tokens: int,
    ) -> None:
        self.world.add(
            prompt,
            tokens,
            choices,
            temperature=temperature,
            priority=priority,
            stop_token_ids=stops,
            min_tokens=min_tokens,
        )

    @rule(count=st.integers(1, 30))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(self.world.live)))

    @rule(tokens=st.integers(1, 8))
    def read(self, tokens: int) -> None:
        self.world.read(tokens)

    @rule(
        rows=st.integers(1, 8),
        tokens=st.integers(1, 64),
        chunk=st.integers(1, 16),
        partial=st.integers(1, 4),
        blocks=st.integers(1, 40),
        line=st.integers(0, 40),
        charge=st.integers(0, 40),
    )
    def limit(self, rows: int, tokens: int, chunk: int, partial: int, blocks: int, line: int, charge: int) -> None:
        self.world.limit(
            max_num_seqs=rows,
            max_num_batched_tokens=tokens,
            prefill_chunk=chunk,
            max_partial_prefills=partial,
            kv_blocks=blocks,
            watermark_blocks=line,
            charge_tokens=charge,
        )

    @rule()
    def run_out(self) -> None:
        self.world.run_out()

    @rule()
    def forget(self) -> None:
        self.world.scheduler.reset_cache()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            type(self).total_steps += self.world.steps


def test_promises_hold_for_any_history() -> None:
    EngineMachine.total_steps = 0
    run_state_machine_as_test(EngineMachine, settings=_SETTINGS)
    assert EngineMachine.total_steps >= STEPS, "fewer steps than promised: raise max_examples"


def _double_free(patch: pytest.MonkeyPatch) -> None:
    """A block that others share is released twice."""
    release = BlockPool.release

    def twice(self: BlockPool, blocks: list[int]) -> None:
        release(self, [*blocks, *(block for block in blocks[:1] if self._refs[block] > 1)])

    patch.setattr(BlockPool, "release", twice)


def _lost_reference(patch: pytest.MonkeyPatch) -> None:
    """The last block of a table of three or more is forgotten."""
    release = BlockPool.release
    patch.setattr(BlockPool, "release", lambda self, blocks: release(self, blocks[:-1] if len(blocks) > 2 else blocks))


def _budget_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Prompts get one token more than is left."""
    budget = policy.prefill_budget
    patch.setattr(Chunked, "budget", staticmethod(lambda *args: budget(*args) + 1))


def _starvation(patch: pytest.MonkeyPatch) -> None:
    """If the budget is too small for all, always the first rows get it."""
    grant = Scheduler._grant_ones

    def unfair(self: Scheduler, ones: list[Any], budget: int, now_ns: int) -> None:
        grant(self, sorted(ones, key=lambda one: one.row)[:budget], budget, now_ns)

    patch.setattr(Scheduler, "_grant_ones", unfair)


def _no_progress(patch: pytest.MonkeyPatch) -> None:
    """Who was preempted wants room to spare even when it is alone."""
    patch.setattr(policy, "headroom_blocks", lambda running, preemptions: 1 << preemptions)


@pytest.mark.parametrize(
    ("plant", "symptom"),
    [
        (_double_free, "references are lost|wrong KV|active|does not hold it"),
        (_lost_reference, "references are lost|left blocks behind"),
        (_budget_off_by_one, "overdrawn|its share|more tokens"),
        (_starvation, "starves"),
        (_no_progress, "no end in sight"),
    ],
)
def test_a_planted_bug_is_caught(plant: Any, symptom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    # As many as it takes: which examples are tried depends on the modules that happen to be imported.
    quick = settings(_SETTINGS, phases=[Phase.generate], report_multiple_bugs=False, max_examples=5000)
    with pytest.raises((AssertionError, ValueError), match=symptom):  # ValueError: the pool sees it itself
        run_state_machine_as_test(EngineMachine, settings=quick)
