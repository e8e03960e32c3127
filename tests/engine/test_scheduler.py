"""What the scheduler promises for one or a few requests; the fake device checks every step for itself."""

from dataclasses import replace

import pytest

from engine.errors import ConfigError
from engine.loop import heaviest
from engine.request import FinishReason, Request
from tests.fakes.runner import lone_run
from tests.fakes.scheduling import STEP_NS, Bench, ceilings, request, widest

_LIMITS = ("prefill_chunk", "max_partial_prefills", "context_limit", "max_num_seqs", "max_num_batched_tokens")


def bench(credit: int = 1 << 30, **shape: int | bool) -> Bench:
    """A scheduler with these ceilings and limits."""
    limits = {name: int(shape.pop(name)) for name in list(shape) if name in _LIMITS}
    resolved = ceilings(**shape)
    return Bench(resolved, widest(resolved, **limits), credit)


def answered_alone(it: Bench, *asked: Request) -> bool:
    """Whether each answer is what a lone run would have given."""
    return all(tuple(it.answers[one.id]) == lone_run(one.prompt, one.sampling) for one in asked)


def test_one_request_gets_its_tokens_and_its_facts_partition_its_life() -> None:
    it = bench()
    asked = request("a", 10, 5)
    it.add(asked)
    it.drain()
    assert answered_alone(it, asked)
    end = it.ends["a"]
    facts = end.facts
    assert end.finish is FinishReason.LENGTH
    assert facts is not None
    assert facts.prefill_ns + facts.decode_ns == facts.emitted_ns - facts.received_ns
    assert facts.prefill_ns == STEP_NS
    assert (facts.prefill_chunks, facts.kv_blocks, facts.kv_tail_slots) == (1, 4, 1)


def test_a_prompt_in_chunks_is_prefill_and_waiting_between() -> None:
    it = bench(max_num_batched_tokens=8)
    asked = [request("a", 20, 2), request("b", 20, 2)]
    it.add(*asked)
    it.drain()
    assert answered_alone(it, *asked)
    for end in it.ends.values():
        facts = end.facts
        assert facts is not None
        stages = facts.queue_ns + facts.prefill_ns + facts.prefill_wait_ns + facts.decode_ns
        assert stages == facts.emitted_ns - facts.received_ns
        assert facts.prefill_chunks >= 3


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    plain = request("a", 10, 8)
    third = lone_run(plain.prompt, plain.sampling)[2]
    it = bench()
    it.add(request("a", plain.prompt, 8, stop_token_ids=(third,)))
    it.drain()
    end = it.ends["a"]
    assert (end.finish, end.stop_token) == (FinishReason.STOP, third)
    assert tuple(it.answers["a"]) == lone_run(plain.prompt, plain.sampling)[:2]


def test_min_tokens_comes_before_a_stop_token() -> None:
    plain = request("a", 10, 8)
    first = lone_run(plain.prompt, plain.sampling)[0]
    it = bench()
    it.add(request("a", plain.prompt, 8, stop_token_ids=(first,), min_tokens=3))
    it.drain()
    assert len(it.answers["a"]) >= 3


def test_the_context_limit_ends_an_answer_and_refuses_a_prompt_that_leaves_no_room() -> None:
    it = bench(context_limit=20)
    it.add(request("long", 15, 100), request("full", 20, 1))
    it.drain()
    assert (it.ends["long"].finish, len(it.answers["long"])) == (FinishReason.LENGTH, 5)
    assert (it.ends["full"].finish, it.ends["full"].error_code) == (FinishReason.ERROR, "context_length_exceeded")


def test_a_prompt_larger_than_the_pool_is_refused_at_once_and_an_answer_ends_where_the_pool_does() -> None:
    it = bench(kv_blocks=4)
    it.add(request("huge", 17, 1))
    assert it.ends["huge"].finish is FinishReason.ERROR
    assert "16" in it.ends["huge"].error
    it.add(request("growing", 10, 100))
    it.drain()
    assert (it.ends["growing"].finish, len(it.answers["growing"])) == (FinishReason.LENGTH, 7)


def test_a_deadline_ends_what_runs_and_what_waits() -> None:
    it = bench(rows=1)
    it.add(
        request("runs", 5, 100, deadline_ns=it.now_ns + 5 * STEP_NS),
        request("waits", 5, 100, deadline_ns=it.now_ns + 3 * STEP_NS),
    )
    assert it.scheduler.next_deadline_ns == it.now_ns + 3 * STEP_NS
    it.drain(most=10)
    assert [end.finish for end in it.ends.values()] == [FinishReason.DEADLINE] * 2
    assert 3 <= len(it.answers["runs"]) <= 5
    assert it.scheduler.next_deadline_ns == 0


def test_priority_goes_first_and_age_decides_among_equals() -> None:
    it = bench(rows=1)
    it.add(request("running", 5, 3))
    it.step()
    it.add(*(request(name, 5, 1, priority=level) for name, level in (("low", 1), ("first", 0), ("second", 0))))
    it.drain()
    assert list(it.ends) == ["running", "first", "second", "low"]


def test_the_same_prompt_again_computes_its_last_token_only_and_copies_what_it_would_overwrite() -> None:
    it = bench()
    first, again = request("a", 16, 4), request("b", request("a", 16).prompt, 4)
    it.add(first)
    it.drain()
    it.add(again)
    plan = it.step()
    assert plan.tokens == 1
    assert len(plan.copies) == 1
    it.drain()
    assert answered_alone(it, first, again)
    facts = it.ends["b"].facts
    assert facts is not None
    assert facts.cached_tokens == 15


def test_no_cache_no_hits() -> None:
    it = bench(prefix_cache=False)
    it.add(request("a", 16, 2))
    it.drain()
    it.add(request("b", request("a", 16).prompt, 2))
    it.drain()
    assert it.hits == 0
    assert it.scheduler.state_facts().kv_cached == 0


def test_salted_requests_share_nothing() -> None:
    it = bench()
    prompt = request("a", 16).prompt
    for name, salt in (("a", ""), ("b", "tenant"), ("c", "other")):
        it.add(request(name, prompt, 2, cache_salt=salt))
        it.drain()
    assert it.hits == 0


def test_a_prefix_shorter_than_a_block_is_called_that() -> None:
    """Case 37."""
    it = bench(block_size=16)
    shared = tuple(range(15))
    it.add(request("a", (*shared, *range(500, 530)), 2))
    it.drain()
    it.add(request("b", (*shared, *range(700, 730)), 2))
    (admission,) = it.step().why.admitted
    assert (admission.cached_tokens, admission.too_short_tokens, admission.missed_tokens) == (0, 15, 30)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("prompt_len", [13, 12, 17, 1])
def test_choices_of_a_group_share_the_prompt_and_copy_its_last_block(prompt_len: int, prefix_cache: bool) -> None:
    it = bench(prefix_cache=prefix_cache)
    prompt = request("a", prompt_len).prompt
    choices = [
        request(f"c{i}", prompt, 6, temperature=1.0, seed=i, group_id="g", index=i, logprobs=0) for i in range(3)
    ]
    it.add(*choices)
    it.step()
    assert it.scheduler.state_facts().running == 1
    plan = it.step()
    assert {piece.count for piece in plan.slices} == {1}
    shared = 2 * ((prompt_len - 1) // 4)
    assert it.scheduler.block_map().count(3) == shared // 2
    it.drain()
    assert answered_alone(it, *choices)
    assert it.runner.written["c1"] == it.runner.written["c2"] == 6


def test_followers_do_without_a_leader_that_leaves() -> None:
    it = bench(max_num_batched_tokens=4)
    prompt = request("a", 13).prompt
    choices = [request(f"c{i}", prompt, 3, temperature=1.0, seed=i, group_id="g") for i in range(3)]
    it.add(*choices)
    it.step()
    it.cancel("c0", "c2")
    it.drain()
    assert answered_alone(it, choices[1])


def test_other_prompts_of_a_group_follow_nobody() -> None:
    it = bench()
    asked = [request("a", 9, 3, group_id="g"), request("b", 9, 3, group_id="g")]
    it.add(*asked)
    assert it.scheduler.state_facts().waiting == 2
    it.step()
    assert it.scheduler.state_facts().running == 2
    it.drain()
    assert answered_alone(it, *asked)


def test_prompt_logprobs_come_once_and_whole_whatever_the_cache_and_preemption() -> None:
    it = bench(max_num_batched_tokens=8, kv_blocks=10)
    warm = request("warm", 16, 1)
    it.add(warm)
    it.drain()
    it.add(request("other", 8, 24), request("echo", warm.prompt, 20, prompt_logprobs=0, logprobs=0))
    it.drain()
    given = [entry for out in it.outputs if out.request_id == "echo" for entry in out.prompt_logprobs]
    assert given[0] is None
    assert [entry.token for entry in given if entry] == list(warm.prompt[1:])
    assert sum(len(out.logprobs) for out in it.outputs if out.request_id == "echo") == 20
    assert it.ends["echo"].facts is not None
    assert it.ends["echo"].facts.preemptions > 0


def test_who_does_not_read_gets_no_more_than_its_credit_and_goes_on_when_it_reads() -> None:
    it = bench(credit=3)
    slow, quick = request("slow", 5, 10), request("quick", 5, 3)
    it.add(slow, quick)
    for _ in range(10):
        it.step()
    assert len(it.answers["slow"]) == 3
    assert not it.step().slices
    it.scheduler.ack({"slow": 2})
    for _ in range(5):
        it.step()
    assert len(it.answers["slow"]) == 5
    while "slow" not in it.ends:
        it.scheduler.ack({"slow": 1})
        it.step()
    assert answered_alone(it, slow, quick)


@pytest.mark.parametrize("shape", [{"rows": 1}, {"rows": 4, "kv_blocks": 6}])
def test_who_does_not_read_does_not_hold_the_engine(shape: dict[str, int]) -> None:
    it = bench(credit=2, **shape)
    slow, other = request("slow", 14, 6), request("other", 14, 2)
    it.add(slow)
    for _ in range(5):
        it.step()
    it.add(other)
    for _ in range(5):
        it.step()
    assert answered_alone(it, other)
    assert "slow" not in it.ends
    for _ in range(20):
        it.scheduler.ack({"slow": 2})
        it.step()
    assert answered_alone(it, slow)


def test_lower_limits_take_effect_and_kill_nobody() -> None:
    it = bench(rows=6, kv_blocks=60)
    asked = [request(name, 16, 20) for name in "abcdef"]
    it.add(*asked)
    for _ in range(3):
        it.step()
    it.scheduler.set_limits(replace(it.limits, kv_blocks=12, max_num_seqs=2))
    plan = it.step()
    facts = it.scheduler.state_facts()
    assert facts.kv_active <= 12
    assert {one.cause for one in plan.why.preempted} == {"limits"}
    assert facts.running + facts.preempted == 6
    it.drain()
    assert answered_alone(it, *asked)
    late = [plan for plan in it.plans[20:] if plan.slices]
    assert max(len(plan.slices) for plan in late) <= 2


def test_limits_beyond_the_ceilings_change_nothing() -> None:
    it = bench(rows=2)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        it.scheduler.set_limits(replace(it.limits, max_num_seqs=3))
    it.add(request("a", 4, 2))
    it.drain()


def test_out_of_memory_costs_the_youngest_its_blocks_and_the_next_step_half_its_size() -> None:
    it = bench(rows=4)
    asked = [request(name, 20, 6) for name in "abcd"]
    it.add(*asked)
    it.runner.oom = lambda plan: plan.tokens > 50
    failed = it.step()
    assert failed.tokens == 80
    plan = it.step()
    assert plan.tokens <= 40
    assert [(one.request_id, one.cause) for one in plan.why.preempted] == [("d", "oom")]
    it.drain()
    assert answered_alone(it, *asked)


def test_the_heaviest_can_be_failed_alone() -> None:
    it = bench()
    it.add(request("small", 5, 5), request("large", 50, 5))
    plan = it.scheduler.plan(it.now_ns)
    it.plans.append(plan)
    piece = heaviest(plan, None)
    assert piece is not None
    assert it.scheduler.in_row(piece.row) == "large"
    it.runner.oom = lambda plan: True
    with pytest.raises(Exception, match="planted"):
        it.runner.launch(plan)
    it.runner.oom = None
    it.scheduler.retry_after_oom(plan, it.now_ns)
    it.take(it.scheduler.fail("large", "out_of_memory", "too large", it.now_ns))
    it.drain()
    assert (it.ends["large"].finish, it.ends["large"].error_code) == (FinishReason.ERROR, "out_of_memory")
    assert it.ends["small"].finish is FinishReason.LENGTH


def test_a_cancelled_request_is_gone_with_its_facts_and_tokens_in_flight_are_dropped() -> None:
    it = bench()
    it.add(request("a", 8, 9), request("b", 8, 3))
    it.step()
    plan = it.scheduler.plan(it.now_ns)
    it.runner.launch(plan)
    it.cancel("a", reason="stop")
    it.take(it.scheduler.commit(it.runner.collect(), it.now_ns))
    it.drain()
    end = it.ends["a"]
    assert end.finish is FinishReason.STOP
    assert end.facts is not None
    assert len(it.answers["a"]) == 1


def test_the_cache_can_be_emptied_while_serving() -> None:
    it = bench()
    asked = [request("a", 16, 2), request("b", 16, 12)]
    it.add(*asked)
    for _ in range(5):
        it.step()
    assert it.scheduler.reset_cache() == 4
    it.drain()
    it.add(request("c", asked[0].prompt, 2))
    it.drain()
    assert it.hits == 0
    assert answered_alone(it, *asked)


def test_misuse_is_an_error_and_not_a_lost_request() -> None:
    it = bench()
    it.add(request("a", 4, 4))
    with pytest.raises(ValueError, match="in use"):
        it.add(request("a", 4, 4))
    it.scheduler.plan(it.now_ns)
    with pytest.raises(RuntimeError, match="is out"):
        it.scheduler.plan(it.now_ns)
    assert it.scheduler.cancel(["nobody"], "abort", it.now_ns) == []
    it.scheduler.ack({"nobody": 5})


def test_what_a_snapshot_shows_of_a_request() -> None:
    it = bench(rows=1)
    it.add(request("a", 8, 9), request("b", 8, 3, priority=4))
    it.step()
    runs, waits = it.scheduler.views()
    assert (runs.request_id, runs.state, runs.stage, runs.output_tokens, runs.kv_blocks) == (
        "a",
        "running",
        "decode",
        1,
        2,
    )
    assert (waits.request_id, waits.state, waits.stage, waits.priority, waits.row) == ("b", "waiting", "queue", 4, -1)
