"""Whether a change stays: by what was computed before it and after, and by the model where that says nothing."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from autotune.change import Change, Known
from autotune.costmodel import Demand
from autotune.objective import Targets
from autotune.space import Space
from autotune.verify import Found, verdict
from autotune.window import Sample, Window
from engine.stepcost import StepCost, StepShape
from tests.autotune.engines import COST, begins, engine

BEFORE = Window(seconds=5, busy_s=5, output_tokens=500, prefill_tokens=500, running=10, waiting=9, finished=5, good=5)
DEMAND = Demand(prompt_tokens=100, output_tokens=100, context_tokens=150, depth_tokens=50)
CHUNK = Change(changes={"prefill_chunk": 144}, why="", predicted={"gain": 0.2})


def found(
    change: Change, after: Window, before: Window = BEFORE, were: Mapping[str, int] | None = None, **known: object
) -> Found:
    limits = begins(engine()).replaced(change.changes)
    what = Known(space=Space.of(engine()), targets=Targets(), memory_rows=64, **known)  # type: ignore[arg-type]
    return verdict(change, [before], [after], were or {"prefill_chunk": 16}, limits, what)


def scaled(by: float) -> Window:
    return replace(BEFORE, output_tokens=round(500 * by), prefill_tokens=round(500 * by))


@pytest.mark.parametrize(("by", "better"), [(1.3, True), (1.11, True), (0.75, False)])
def test_what_is_plain_needs_no_model(by: float, better: bool) -> None:
    assert found(CHUNK, scaled(by), cost=COST, demand=DEMAND).better is better
    assert found(CHUNK, scaled(by)).better is better


@pytest.mark.parametrize("by", [0.95, 1.0, 1.05])
def test_where_the_noise_is_larger_the_model_decides(by: float) -> None:
    """Ten rows want ten tokens of prompts a step: of chunks of 4 they wait, chunks of 144 do not help beyond 16."""
    starved = found(CHUNK, scaled(by), were={"prefill_chunk": 4}, cost=COST, demand=DEMAND)
    assert starved.better
    assert "expects +" in starved.why
    assert not found(CHUNK, scaled(by), were={"prefill_chunk": 100}, cost=COST, demand=DEMAND).better
    assert not found(CHUNK, scaled(by)).better  # without a model a promise has to be seen


def test_fewer_rows_have_to_show_that_they_pay() -> None:
    """Whatever the model says: it is what proposed them."""
    fewer = Change(changes={"max_num_seqs": 8}, why="", predicted={"gain": 0.2})
    were = {"max_num_seqs": 64}
    assert not found(fewer, scaled(1.05), were=were, cost=COST, demand=DEMAND).better
    assert found(fewer, scaled(1.15), were=were, cost=COST, demand=DEMAND).better


def test_prompts_that_a_change_lets_in_are_not_held_against_it() -> None:
    """Fewer tokens of answers for a while, since twice as many prompts are being read."""
    filling = replace(BEFORE, output_tokens=400, prefill_tokens=1200)
    assert found(CHUNK, filling, cost=COST, demand=DEMAND).better
    assert not found(CHUNK, filling).better
    thrown_away = replace(filling, lost_tokens=1200)
    assert not found(CHUNK, thrown_away, cost=COST, demand=DEMAND).better


def test_a_token_counts_for_what_it_costs_where_it_stands() -> None:
    """The end of long prompts takes three times as long as their begin: as much was done."""
    deep = replace(COST, pair_s=COST.prefill_s / 500)
    demand = Demand(prompt_tokens=2000, output_tokens=100, context_tokens=2000, depth_tokens=1000)

    def reads(tokens: int, depth: int) -> Window:
        step = Sample(StepShape(100, 5, 10_000, 100 * depth), 1.0)
        return replace(BEFORE, prefill_tokens=tokens, output_tokens=100, samples=(step,))

    begin, end = reads(3000, 250), reads(1500, 1000)  # 3000 x 1.5 and 1500 x 3
    assert found(CHUNK, end, begin, cost=deep, demand=demand).measured["after"] == pytest.approx(
        found(CHUNK, end, begin, cost=deep, demand=demand).measured["before"]
    )


def test_what_a_step_costs_in_any_case_is_paid_by_its_prompt() -> None:
    """Where each step carries one, ten answers more a second are worth what their rows add, and no more."""
    demand = Demand(prompt_tokens=1000, output_tokens=100, context_tokens=0, depth_tokens=500)
    cost = StepCost(fixed_s=0.1, prefill_s=0.001, row_s=0.002, context_s=0.0)
    more_read = replace(BEFORE, prefill_tokens=600, output_tokens=450)  # 100 x 1 ms for 50 x 2 ms
    measured = found(CHUNK, more_read, cost=cost, demand=demand).measured
    assert measured["after"] == pytest.approx(measured["before"], rel=0.01)


def test_requests_that_missed_their_targets_do_not_count() -> None:
    assert not found(CHUNK, replace(scaled(1.5), good=2)).better


def test_another_goal_has_to_fall() -> None:
    late = Change(changes={"prefill_chunk": 144}, why="", goal="ttft_p95_s")
    before = replace(BEFORE, ttft_p95_s=4.0)
    assert found(late, replace(BEFORE, ttft_p95_s=2.0), before).better
    assert not found(late, replace(BEFORE, ttft_p95_s=4.1), before).better
    assert "not measured" in found(late, BEFORE, before).why


def test_where_nobody_waits_any_more_nothing_speaks_against_it() -> None:
    calm = replace(scaled(0.3), waiting=0.0)
    assert found(CHUNK, calm).why.endswith("and nobody waits any more")
