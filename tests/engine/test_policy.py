"""The rules of order and sharing, one by one."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine import policy


def test_priority_goes_before_age_and_age_goes_before_nothing() -> None:
    early, late = policy.rank(0, 0, 1), policy.rank(500, 0, 2)
    urgent = policy.rank(500, -1, 3)
    assert urgent < early < late


def test_whoever_waits_long_enough_overtakes_any_priority() -> None:
    low = policy.rank(0, 2, 1)
    assert low > policy.rank(policy.PRIORITY_TOKENS, 0, 2)
    assert low < policy.rank(3 * policy.PRIORITY_TOKENS, 0, 3)


def test_a_long_prompt_is_overtaken_only_by_those_that_come_within_its_own_length() -> None:
    long_one = policy.admission_key(policy.rank(0, 0, 1), 2000)
    assert policy.admission_key(policy.rank(1800, 0, 2), 100) < long_one
    assert policy.admission_key(policy.rank(2000, 0, 3), 1) > long_one


@given(st.integers(1, 10_000), st.lists(st.integers(1, 5000), max_size=12), st.integers(1, 12))
def test_shares_stay_within_tokens_and_needs_and_leave_nothing_over(
    tokens: int, pending: list[int], slots: int
) -> None:
    shares = policy.share(tokens, pending, slots)
    assert all(0 <= got <= need for got, need in zip(shares, pending, strict=True))
    assert sum(shares) == min(tokens, sum(pending)) or (tokens < len(pending) and sum(shares) == tokens)


@given(st.integers(1, 10_000), st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_everybody_gets_a_floor(tokens: int, pending: list[int]) -> None:
    slots = len(pending)
    if tokens >= slots:
        floor = min(policy.floor_share(tokens, slots), tokens // slots)
        assert floor >= 1
        assert all(
            got >= min(floor, need) for got, need in zip(policy.share(tokens, pending, slots), pending, strict=True)
        )


def test_the_one_nearest_its_end_gets_what_is_over() -> None:
    assert policy.share(100, [1000, 60], 2) == [40, 60]


def test_the_last_slot_is_for_a_short_prompt() -> None:
    assert policy.may_open(2000, [2000, 2000], 4)
    assert not policy.may_open(2000, [2000, 2000, 2000], 4)
    assert policy.may_open(100, [2000, 2000, 2000], 4)
    assert not policy.may_open(1, [2000, 2000, 2000, 100], 4)
    assert policy.may_open(2000, [], 1)


@given(st.integers(1, 64))
def test_neither_decode_nor_prefill_is_shut_out_for_two_steps(tokens: int) -> None:
    budgets = [policy.decode_budget(tokens, True, step) for step in (1, 2)]
    assert all(0 <= budget <= tokens for budget in budgets)
    assert max(budgets) >= 1
    assert min(budgets) < tokens
    assert policy.decode_budget(tokens, False, 1) == tokens


def test_prefill_is_capped_only_while_others_decode() -> None:
    assert policy.prefill_budget(500, 3, 32, 0, 3000) == 32
    assert policy.prefill_budget(500, 3, 32, 3000, 3000) == 16, "a position costs twice as much there"
    assert policy.prefill_budget(500, 3, 32, 1 << 30, 3000) == 1
    assert policy.prefill_budget(500, 0, 32, 3000, 3000) == 500


def test_a_sequence_is_resumed_into_more_and_more_room_and_alone_at_once() -> None:
    assert policy.headroom_blocks(0, 9) == 0
    rooms = [policy.headroom_blocks(4, preemptions) for preemptions in range(5)]
    assert all(after == 2 * before for before, after in pairwise(rooms))
