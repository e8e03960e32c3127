"""What operators have suffered elsewhere, as far as the scheduler can prevent it. Counted in grants and steps, not in
time, so that it holds on any machine. The numbers are those of the catalogue of cases."""

import random
from dataclasses import replace

from engine.request import FinishReason, Request
from tests.fakes.runner import lone_run
from tests.fakes.scheduling import Bench, ceilings, request, widest


def bench(rows: int = 32, kv_blocks: int = 4096, block_size: int = 16, **limits: int) -> Bench:
    """A machine like a small CPU: 512 tokens a step, prompts in chunks of 32 while others decode."""
    resolved = ceilings(rows=rows, kv_blocks=kv_blocks, block_size=block_size, step_tokens=512, max_model_len=10_000)
    return Bench(resolved, widest(resolved, **{"prefill_chunk": 32, **limits}))


def granted_until_first_token(it: Bench, names: list[str], most: int = 3000) -> dict[str, int]:
    """Tokens that were granted in all, from now until each of `names` had its first token."""
    granted, seen = 0, {}
    for _ in range(most):
        granted += it.step().tokens
        for name in names:
            if name not in seen and it.answers.get(name):
                seen[name] = granted
        if len(seen) == len(names):
            return seen
    raise AssertionError(f"no token for {sorted(set(names) - set(seen))}")


def test_case_7_requests_aborted_at_any_stage_leave_no_block_and_no_entry_behind() -> None:
    it = bench(rows=6, kv_blocks=40, block_size=4)
    rng = random.Random(7)
    live: list[str] = []
    for i in range(600):
        if len(live) < 12:
            group = [
                request(f"r{i}.{k}", tuple(rng.choices(range(3), k=rng.randint(1, 60))), 30, group_id=f"g{i}")
                for k in range(rng.randint(1, 3))
            ]
            it.add(*group)
            live += [one.id for one in group]
        it.step()
        live = [name for name in live if name not in it.ends]
        if live and rng.random() < 0.5:
            name = live.pop(rng.randrange(len(live)))
            it.cancel(name)
            assert it.ends[name].finish is FinishReason.ABORT
        it.scheduler._pool.invariants()
    it.cancel(*live)
    it.drain()
    facts = it.scheduler.state_facts()
    assert (facts.running, facts.waiting, facts.preempted, facts.kv_active) == (0, 0, 0, 0)
    assert facts.kv_cached + facts.kv_free == 40
    cache = {"prefixes", "pool_cached", "pool_dirty", "pool_free_runs", "pool_ages"}
    assert not {name: size for name, size in it.scheduler.sizes().items() if size and name not in cache}
    assert not it.runner.rows


def test_case_16_short_requests_do_not_wait_for_long_prompts_that_came_first() -> None:
    it = bench()
    it.add(*(request(f"long{i}", 2000, 8) for i in range(18)))
    for _ in range(4):
        it.step()
    shorts = [f"short{i}" for i in range(11)]
    it.add(*(request(name, 100, 8) for name in shorts))
    first = granted_until_first_token(it, shorts)
    # All of their own work is 1,100 tokens, and at least half of each step is theirs; 18 long ones are 36,000.
    assert max(first.values()) <= 2 * 1100 + 2 * 512
    it.drain()
    assert all(len(it.answers[f"long{i}"]) == 8 for i in range(18))


def test_case_17_one_long_prompt_does_not_block_later_ones() -> None:
    it = bench()
    it.add(request("long", 8000, 4))
    it.step()
    shorts = [f"short{i}" for i in range(20)]
    it.add(*(request(name, 60, 4) for name in shorts))
    first = granted_until_first_token(it, shorts)
    assert max(first.values()) <= 2 * 1200 + 2 * 512
    assert "long" not in it.answers
    granted_until_first_token(it, ["long"])


def test_case_17_prompts_partly_computed_at_once_are_capped() -> None:
    it = bench(max_partial_prefills=3)
    it.add(*(request(f"p{i}", 700 + 200 * i, 2) for i in range(12)))
    while it.scheduler.has_work:
        it.step()
        partial = [view for view in it.scheduler.views() if view.row >= 0 and not view.output_tokens]
        assert len(partial) <= 3
    assert all(len(answer) == 2 for answer in it.answers.values())


def test_case_18_running_streams_get_a_token_in_every_step_and_prefill_only_its_share() -> None:
    it = bench()
    streams = [f"stream{i}" for i in range(8)]
    it.add(*(request(name, 20, 2000) for name in streams))
    it.step()
    it.add(request("long", 8000, 1), request("longer", 9000, 1))
    before = {name: len(it.answers[name]) for name in streams}
    steps = 0
    while len(it.ends) < 2:
        plan = it.step()
        steps += 1
        assert plan.why.decode_rows == 8
        assert plan.tokens <= 8 + 32
    assert all(len(it.answers[name]) - before[name] == steps for name in streams)
    assert steps <= 17_000 // 32 + 2


def test_case_20_a_pool_too_small_for_two_makes_progress_without_a_loop() -> None:
    """Each fits alone; together they need half as much again. What is computed twice is bounded, and so is the wait."""
    for prompt, answer in ((60, 100), (100, 28), (8, 150)):
        it = bench(rows=4, kv_blocks=10)
        asked = [request(f"r{i}", prompt, answer) for i in range(5)]
        it.add(*asked)
        tokens = [0]
        while it.scheduler.has_work:
            it.step()
            tokens.append(sum(map(len, it.answers.values())))
            if len(tokens) > 8:
                assert tokens[-1] > tokens[-9] or not it.scheduler.has_work, "no token in eight steps"
        assert all(tuple(it.answers[one.id]) == lone_run(one.prompt, one.sampling) for one in asked)
        useful = 5 * (prompt + answer)
        assert sum(plan.tokens for plan in it.plans) <= 3 * useful
        preemptions = [end.facts.preemptions for end in it.ends.values() if end.facts]
        assert preemptions[0] == 0, "the oldest is never preempted for a younger one"
        assert max(preemptions) <= 5


def test_case_21_every_preemption_says_who_lost_what_and_why() -> None:
    it = bench(rows=4, kv_blocks=10)
    it.add(*(request(f"r{i}", 60, 60) for i in range(3)))
    it.drain()
    lost: dict[str, int] = {}
    for plan in it.plans:
        for one in plan.why.preempted:
            assert one.cause == "kv"
            lost[one.request_id] = lost.get(one.request_id, 0) + one.tokens_lost
    assert lost
    for name, end in it.ends.items():
        facts = end.facts
        assert facts is not None
        assert facts.preempted_tokens == lost.get(name, 0)
        assert (facts.preempted_ns > 0) == (facts.preemptions > 0)
    again = sum(plan.why.recompute_tokens for plan in it.plans)
    assert 0 < again <= sum(lost.values())


def test_case_30_whoever_left_is_gone_before_the_next_step_at_every_stage() -> None:
    def held(it: Bench) -> int:
        return it.scheduler.state_facts().kv_active

    for steps_before in range(14):
        it = bench(rows=2, block_size=4, max_num_batched_tokens=8)
        it.add(request("stays", 9, 40))
        it.step()
        it.add(request("leaves", 30, 20), request("waits", 5, 30))
        for _ in range(steps_before):
            it.step()
        it.cancel("leaves", "waits")
        plan = it.step()
        assert {view.request_id for view in it.scheduler.views()} == {"stays"}
        assert len(plan.slices) == 1
        (view,) = it.scheduler.views()
        assert held(it) == view.kv_blocks
        assert {it.ends[name].finish for name in ("leaves", "waits")} == {FinishReason.ABORT}


def test_case_36_recomputation_is_no_hit() -> None:
    rng = random.Random(36)
    it = bench(rows=8, kv_blocks=64)
    asked = [request(f"r{i}", tuple(rng.choices(range(50_000), k=60)), 80) for i in range(8)]
    it.add(*asked)
    for _ in range(10):
        it.step()
    it.scheduler.set_limits(replace(it.limits, kv_blocks=16))  # what is preempted stays in the cache for a while
    it.drain()
    admissions = [one for plan in it.plans for one in plan.why.admitted]
    again = [one for one in admissions if one.recomputed]
    assert again, "nothing was preempted: the test shows nothing"
    assert sum(one.cached_tokens for one in again) > 0, "nothing was found again: the test shows nothing"
    assert it.hits == 0
    assert sum(one.missed_tokens + one.too_short_tokens for one in admissions if not one.recomputed) == 8 * 60
    assert all(end.facts and end.facts.cached_tokens == 0 for end in it.ends.values())


def test_case_41_nothing_of_another_request_appears_after_an_abort_and_the_reuse_of_its_row() -> None:
    rng = random.Random(41)
    it = bench(rows=3, kv_blocks=30, block_size=4)
    asked: dict[str, Request] = {}
    for i in range(400):
        name = f"r{i}"
        prompt = tuple(rng.choices(range(4), k=rng.randint(1, 40)))
        asked[name] = request(name, prompt, rng.randint(1, 25), temperature=float(i % 2), seed=i, logprobs=0)
        it.add(asked[name])
        it.step()
        views = it.scheduler.views()
        if views and rng.random() < 0.6:
            it.cancel(rng.choice(views).request_id)
    it.drain()
    for name, one in asked.items():
        answer, alone = tuple(it.answers.get(name, ())), lone_run(one.prompt, one.sampling)
        assert answer == alone[: len(answer)]
        if it.ends[name].finish is FinishReason.LENGTH:
            assert answer == alone
    for output in it.outputs:
        assert tuple(entry.token for entry in output.logprobs) == output.tokens
