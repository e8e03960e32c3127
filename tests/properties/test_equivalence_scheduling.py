"""The same requests get the same answers however their work was cut, shared, dropped and repeated."""

import random

import pytest

from engine.request import Request
from tests.fakes.runner import lone_run
from tests.fakes.scheduling import Bench, ceilings, request, widest

_PLAIN: dict[str, int | bool] = {"prefix_cache": False, "kv_blocks": 4096, "rows": 32}


def traffic(seed: int) -> list[Request]:
    """Requests that share prefixes now and then, greedy and sampled, some of them in groups."""
    rng = random.Random(seed)
    system = tuple(rng.choices(range(100), k=37))
    asked = []
    for i in range(20):
        prompt = system[: rng.choice((0, 8, 37))] + tuple(rng.choices(range(100), k=rng.randint(1, 60)))
        asked += [
            request(f"r{i}.{k}", prompt, rng.randint(1, 30), temperature=float(i % 2), seed=k, group_id=f"g{i}")
            for k in range(rng.choice((1, 1, 2)))
        ]
    return asked


def served(asked: list[Request], shape: dict[str, int | bool], limits: dict[str, int]) -> Bench:
    resolved = ceilings(**{**_PLAIN, **shape})
    bench = Bench(resolved, widest(resolved, **limits))
    for i in range(0, len(asked), 5):
        bench.add(*asked[i : i + 5])
        bench.step()
    bench.drain()
    return bench


@pytest.mark.parametrize(
    ("shape", "limits"),
    [
        ({}, {}),
        ({"prefix_cache": True}, {}),
        ({}, {"max_num_batched_tokens": 7, "prefill_chunk": 3}),
        ({"kv_blocks": 40}, {}),
        ({"prefix_cache": True, "kv_blocks": 40}, {"max_num_batched_tokens": 16, "prefill_chunk": 5}),
        ({"prefix_cache": True, "rows": 1}, {}),
        ({"prefix_cache": True, "block_size": 16}, {"max_partial_prefills": 1}),
    ],
    ids=["plain", "prefix cache", "chunks", "preemption", "all of them", "one by one", "large blocks"],
)
def test_answers_do_not_depend_on_how_they_were_scheduled(shape: dict[str, int | bool], limits: dict[str, int]) -> None:
    asked = traffic(2)
    bench = served(asked, shape, limits)
    for one in asked:
        assert tuple(bench.answers[one.id]) == lone_run(one.prompt, one.sampling), one.id
    if shape.get("prefix_cache"):
        assert bench.hits > 0, "nothing was shared: the test shows nothing"
    if shape.get("kv_blocks"):
        assert any(plan.why.preempted for plan in bench.plans), "nothing was preempted: the test shows nothing"
    if "max_num_batched_tokens" in limits:
        assert max(end.facts.prefill_chunks for end in bench.ends.values() if end.facts) > 3
