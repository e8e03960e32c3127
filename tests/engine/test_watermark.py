"""Admission keeps to the watermark: newcomers wait while those who run will fill it, by what each is charged."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import Limits
from engine.features import parts
from engine.kv.outlook import most_active
from engine.report import StateFacts
from tests.fakes.scheduling import Bench, ceilings, request, widest

LINE = 20  # blocks of 4 tokens


def bench(line: int = LINE, charge: int = 1024, without: tuple[str, ...] = ()) -> Bench:
    resolved = ceilings(max_model_len=256)
    limits = widest(resolved, watermark_blocks=line, charge_tokens=min(charge, 256))
    return Bench(resolved, limits, parts=parts(without))


def facts(one: Bench) -> StateFacts:
    return one.scheduler.state_facts()


def running(one: Bench) -> int:
    return facts(one).running


def test_as_many_run_as_fit_below_the_line_at_their_ends() -> None:
    """Each holds 2 blocks at first and 5 in the end: of ten, four run at once, and the line is never passed."""
    one = bench()
    one.add(*[request(f"r{n}", 8, tokens=12) for n in range(10)])
    plan = one.step()
    assert running(one) == 4
    assert plan.why.waiting_kv == 6
    most = 0
    while one.scheduler.has_work:
        one.step()
        most = max(most, facts(one).kv_active)
    assert LINE - 4 <= most <= LINE
    assert len(one.ends) == 10
    assert not any(end.facts.preemptions for end in one.ends.values() if end.facts)


def test_what_is_charged_is_at_most_what_was_asked_for() -> None:
    one = bench(charge=4)
    one.add(*[request(f"long{n}", 8, tokens=200) for n in range(10)])  # charged 4 tokens: 3 blocks in the end
    one.step()
    assert running(one) == 6
    other = bench(charge=200)
    other.add(*[request(f"short{n}", 8, tokens=4) for n in range(10)])
    other.step()
    assert running(other) == 6


def test_one_alone_is_let_in_whatever_it_needs() -> None:
    one = bench()
    one.add(request("large", 120, tokens=8), request("small", 4, tokens=4))
    one.step()
    assert running(one) == 1
    one.drain()
    assert len(one.answers["large"]) == 8
    assert len(one.answers["small"]) == 4


def test_shared_blocks_are_counted_once() -> None:
    """Four choices of one prompt: 9 blocks of it together, and 3 of its own each: 21, not 48."""
    one = bench(line=21)
    group = [request(f"g.{n}", tuple(range(40)), tokens=8, seed=n, group_id="g") for n in range(4)]
    one.add(*group)
    one.step()
    one.step()
    assert running(one) == 4
    one.drain()


def test_a_line_moves_while_serving_and_ends_nobody() -> None:
    one = bench()
    one.add(*[request(f"r{n}", 8, tokens=12) for n in range(10)])
    one.step()
    lower = widest(one.resolved, watermark_blocks=5, charge_tokens=256)
    one.scheduler.set_limits(lower)
    one.step()
    assert running(one) == 4
    one.scheduler.set_limits(widest(one.resolved))  # none
    one.step()
    assert running(one) == 8  # all rows
    one.drain()
    assert len(one.ends) == 10


def test_who_will_have_ended_leaves_room_to_who_has_just_begun() -> None:
    """Answers of 1 to 48 tokens: with room for the ends of all, 56 blocks would be full with 7.4 of them."""
    line, dice = 56, random.Random(3)
    resolved = ceilings(max_model_len=256, rows=32)
    one = Bench(resolved, widest(resolved, watermark_blocks=line, charge_tokens=256))
    most, rows = 0, []
    for n in range(400):
        one.add(request(f"r{n}", 4, tokens=dice.randint(1, 48)))
        one.step()
        most = max(most, facts(one).kv_active)
        rows.append(running(one))
    assert line - 6 <= most <= line + 2  # blocks are whole
    assert sum(rows[50:]) / len(rows[50:]) > 8
    one.drain()


@given(
    holders=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12),
    shared=st.integers(0, 5),
    size=st.sampled_from([1, 4]),
)
def test_the_outlook_is_the_most_of_all_moments_to_come(holders: list[tuple[int, int]], shared: int, size: int) -> None:
    active = shared + sum(own for _, own in holders)

    def at(moment: int) -> float:
        there = [(tokens, own) for tokens, own in holders if tokens >= moment]
        return shared + sum(own + moment / size for _, own in there)

    expected = max([active, *(at(moment) for moment in range(41))])
    assert most_active(active, holders, size) == pytest.approx(expected)


def test_who_outlives_the_charge_is_charged_again() -> None:
    """Charged 4 of the 60 tokens that they ask for, two that run keep what they need next to themselves."""
    one = bench(line=12, charge=4)
    one.add(*[request(f"r{n}", 8, tokens=60) for n in range(9)])
    one.step()
    assert running(one) == 4
    for _ in range(20):
        one.step()
    one.add(request("late", 8, tokens=60))
    one.step()
    assert running(one) == 4
    one.drain()
    assert len(one.ends) == 10


def test_a_shared_prompt_is_given_back_by_the_last_who_holds_it() -> None:
    """The first, who computed it, ends first; what the others hold of it stays."""
    one = bench(line=19)
    prompt = tuple(range(40))  # 10 blocks
    one.add(request("first", prompt, tokens=4))
    one.step()
    one.add(*[request(f"r{n}", (*prompt, 100 + n), tokens=12, seed=n) for n in range(6)])
    most = 0
    while one.scheduler.has_work:
        one.step()
        most = max(most, facts(one).kv_active)
    assert 16 <= most <= 20
    assert len(one.ends) == 7


def test_reserving_the_longest_context_fills_the_line_sooner() -> None:
    """Without paging every sequence holds 64 blocks: one runs."""
    one = bench(line=63, without=("paged_kv",))
    one.add(*[request(f"r{n}", 8, tokens=12) for n in range(3)])
    one.step()
    assert running(one) == 1
    one.drain()


@pytest.mark.parametrize("name", ["watermark_blocks", "charge_tokens"])
def test_none_is_a_legal_line(name: str) -> None:
    resolved = ceilings()
    limits = Limits(**{**resolved.ceilings(), name: 0})
    assert limits.within(resolved) is limits
