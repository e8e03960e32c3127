"""A million steps of random histories through the scheduler, every promise checked after every step."""

import random
import time
from collections import Counter
from typing import Any

from tests.fakes.world import World
from tests.perf.harness import Findings

TITLE = "The scheduler's state machine: random histories, checked after every step"
PROMISE = "a million steps find no lost block and no broken promise"

_STEPS = 1_000_000
_WORLD_STEPS = 10_000  # then a fresh world of another shape


def run(quick: bool) -> Findings:
    """Worlds of random shapes until enough steps were made. A broken promise raises AssertionError with the seed."""
    want = 2_000 if quick else _STEPS
    runs: list[dict[str, Any]] = []
    done: Counter[str] = Counter()
    began = time.monotonic()
    seed = 0
    while done["steps"] < want:
        facts = history(seed, min(_WORLD_STEPS, want))
        done.update(facts)
        runs.append({"seed": seed, **facts})
        seed += 1
    return Findings(
        runs=runs,
        summary={**done, "worlds": seed, "took_s": round(time.monotonic() - began, 1)},
        met=done["steps"] >= want,
        seeds=list(range(seed)),
        notes=["the promises are the assertions of tests/fakes/world.py and tests/fakes/runner.py"],
    )


def history(seed: int, steps: int) -> dict[str, int]:
    """One world from beginning to end. Returns what happened in it."""
    rng = random.Random(seed)
    world = World(
        {
            "rows": rng.choice([1, 2, 4, 8]),
            "kv_blocks": rng.choice([3, 8, 12, 40]),
            "block_size": rng.choice([1, 2, 4]),
            "step_tokens": rng.choice([1, 2, 3, 8, 64]),
            "max_model_len": rng.choice([20, 60]),
            "prefix_cache": rng.random() < 0.7,
        },
        patience=rng.choice([3, 1 << 30]),
    )
    facts: Counter[str] = Counter()
    try:
        while world.steps < steps:
            _something(world, rng, facts)
            for _ in range(rng.randint(1, 6)):
                plan = world.step()
                facts["preemptions"] += len(plan.why.preempted)
                facts["copies"] += len(plan.copies)
        world.drain()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, step {world.steps}: {error}") from error
    return {"steps": world.steps, "requests": facts["requests"], **facts}


def _something(world: World, rng: random.Random, facts: Counter[str]) -> None:
    """What clients, readers, an operator or a tight memory do next."""
    dice = rng.random()
    if dice < 0.6:
        facts["requests"] += 1
        world.add(
            tuple(rng.choices((1, 2), k=rng.randint(1, 24))),
            rng.randint(1, 40),
            rng.choice((1, 1, 1, 3)),
            temperature=rng.choice((0.0, 1.0)),
            priority=rng.choice((0, 0, 1)),
            stop_token_ids=rng.choice(((), tuple(range(60)))),
            min_tokens=rng.choice((0, 2)),
        )
    elif dice < 0.7 and world.live:
        facts["cancelled"] += 1
        world.cancel(rng.choice(world.live))
    elif dice < 0.75:
        world.limit(
            max_num_seqs=rng.randint(1, 8),
            max_num_batched_tokens=rng.randint(1, 64),
            prefill_chunk=rng.randint(1, 16),
            max_partial_prefills=rng.randint(1, 4),
            kv_blocks=rng.randint(1, 40),
            watermark_blocks=rng.randint(0, 40),
            charge_tokens=rng.randint(0, 40),
        )
    elif dice < 0.78:
        facts["out_of_memory"] += 1
        world.run_out()
    elif dice < 0.79:
        world.scheduler.reset_cache()
    world.read(rng.randint(1, 8))
