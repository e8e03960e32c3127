"""What can be switched off: each twin does what its name says, and changes no token of any answer."""

import random

import pytest

from engine.config import FEATURES, EngineConfig
from engine.errors import ConfigError
from engine.features import StaticBatches, Whole, parts
from engine.kv.layout import blocks_for
from engine.request import Request
from tests.fakes.runner import lone_run
from tests.fakes.scheduling import Bench, ceilings, request, widest

OURS = ("continuous_batching", "chunked_prefill", "paged_kv")
LONGEST = 128


def bench(*without: str, rows: int = 4, kv_blocks: int = 4 * LONGEST // 4) -> Bench:
    resolved = ceilings(rows=rows, kv_blocks=kv_blocks, step_tokens=LONGEST + rows, max_model_len=LONGEST)
    return Bench(resolved, widest(resolved, prefill_chunk=8), parts=parts(without))


def traffic(seed: int) -> list[Request]:
    rng = random.Random(seed)
    shared = tuple(rng.choices(range(50), k=24))
    return [
        request(
            f"r{n}", shared[: rng.choice((0, 24))] + tuple(rng.choices(range(50), k=rng.randint(1, 70))), 1 + n % 13
        )
        for n in range(24)
    ]


@pytest.mark.parametrize("without", [*((name,) for name in OURS), OURS], ids="+".join)
@pytest.mark.parametrize("kv_blocks", [4 * LONGEST // 4, LONGEST // 4 + 3], ids=["roomy", "tight"])
def test_no_switch_changes_an_answer(without: tuple[str, ...], kv_blocks: int) -> None:
    tried, asked = bench(*without, kv_blocks=kv_blocks), traffic(3)
    for n in range(0, len(asked), 6):
        tried.add(*asked[n : n + 6])
        for _ in range(5):
            tried.step()
    tried.drain()
    for one in asked:
        assert tuple(tried.answers[one.id]) == lone_run(one.prompt, one.sampling), one.id


def test_a_static_batch_is_joined_by_nobody_until_its_last_has_ended() -> None:
    tried = bench("continuous_batching")
    tried.add(request("a", 5, 3), request("b", 5, 9))
    tried.step()
    tried.add(request("late", 5, 2))
    while "b" not in tried.ends:
        plan = tried.step()
        assert all(init.request_id != "late" for init in plan.admitted)
    assert tried.ends.keys() == {"a", "b"}
    tried.drain()
    assert "late" in tried.ends


def test_a_batch_larger_than_a_step_is_still_one_batch() -> None:
    gate = StaticBatches()
    assert [gate.rows(running, 9, 4) for running in (0, 2, 4, 4)] == [4, 4, 4, 4]
    assert gate.rows(3, 5, 4) == 0, "one has ended"
    assert gate.rows(0, 5, 4) == 4, "all have"


def test_whole_prompts_take_one_step_whoever_decodes() -> None:
    tried = bench("chunked_prefill")
    tried.add(request("short", 4, 60))
    tried.step()
    tried.add(request("long", 100, 2))
    plan = tried.step()
    assert max(piece.count for piece in plan.slices) == 100
    in_pieces = bench()
    in_pieces.add(request("short", 4, 60))
    in_pieces.step()
    in_pieces.add(request("long", 100, 2))
    assert max(piece.count for piece in in_pieces.step().slices) < 100


def test_a_prompt_that_no_step_holds_is_still_served() -> None:
    whole = Whole()
    assert whole.budget(50, 0, 8, 0, 1) == 50
    assert whole.may_open(60, [], 4)
    assert not whole.may_open(40, [], 4), "the next step holds it"
    whole.budget(50, 3, 8, 0, 1)
    assert not whole.may_open(60, [], 4), "once nobody decodes"


def test_reserving_takes_the_longest_context_for_every_request() -> None:
    tried = bench("paged_kv", kv_blocks=3 * LONGEST // 4)
    tried.add(*(request(f"r{n}", 5, 40) for n in range(5)))
    tried.step()
    facts = tried.scheduler.state_facts()
    assert facts.running == 3, "a fourth would not have its longest context"
    assert facts.kv_active == 3 * blocks_for(LONGEST, 4)


def test_an_unknown_feature_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'magic' is no feature"):
        EngineConfig(model_dir="m", without=("magic",))
    assert EngineConfig.from_dict({"model_dir": "m", "without": list(FEATURES)}).without
