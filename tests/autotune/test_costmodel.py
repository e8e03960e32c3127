"""The cost of a step is found again from noisy steps, never negative, and its forecast has the knee it should."""

import math
import random
from collections.abc import Callable
from dataclasses import asdict

import pytest

from autotune.costmodel import Demand, forecast
from autotune.simulate import Simulation
from autotune.workload import Mix, synthetic
from engine.stepcost import CostFit, StepCost, StepShape
from tests.autotune.engines import COST, begins, engine


def gauss(rng: random.Random, noise: float) -> float:
    return rng.gauss(1, noise)


def learned(
    cost: StepCost, steps: int, noise: float, spread: Callable[[random.Random, float], float] = gauss
) -> CostFit:
    rng, fit = random.Random(1), CostFit(2000)
    for _ in range(steps):
        rows = rng.randint(0, 40)
        prefill = rng.choice([0, 0, 0, 16, 64, 200]) if rows else 64
        shape = StepShape(prefill, rows, rows * rng.randint(50, 800), prefill * rng.randint(1, 800))
        fit.learn(shape, cost.seconds(shape) * spread(rng, noise) * 1e9)
    return fit


def test_coefficients_are_found_again_through_noise() -> None:
    found = learned(COST, 2000, 0.05).cost()
    assert found is not None
    for rows, prefill, context in ((1, 0, 100), (8, 0, 3000), (32, 0, 9000), (8, 64, 3000), (0, 200, 200)):
        shape = StepShape(prefill, rows, context, prefill * 32)
        assert found.seconds(shape) == pytest.approx(COST.seconds(shape), rel=0.06)
    assert found.prefill_s == pytest.approx(COST.prefill_s, rel=0.06)


def test_nothing_is_claimed_before_there_were_steps() -> None:
    assert learned(COST, 5, 0.0).cost() is None


def test_it_follows_a_machine_that_becomes_slower_and_says_how_wrong_it_is() -> None:
    fit = learned(COST, 3000, 0.02)
    assert fit.error_ratio < 0.05
    slow = StepCost(fixed_s=0.04, prefill_s=0.0018, row_s=0.003, context_s=2e-6, crowd_s=2e-5)
    rng = random.Random(2)
    worst = 0.0
    for step in range(6000):
        rows = rng.randint(1, 40)
        if not step % 50:
            fit.cost()
        shape = StepShape(0, rows, rows * 300)
        fit.learn(shape, slow.seconds(shape) * 1e9)
        worst = max(worst, fit.error_ratio)
    found = fit.cost()
    assert worst > 0.2
    assert found is not None
    assert found.seconds(StepShape(0, 20, 6000)) == pytest.approx(slow.seconds(StepShape(0, 20, 6000)), rel=0.1)


def test_no_cost_is_negative_even_where_the_fit_has_one_below_nothing() -> None:
    fit = CostFit()
    for rows, ms in ((1, 1.0), (2, 2.5), (3, 4.0)) * 200:  # a line through -0.5
        fit.learn(StepShape(0, rows), ms * 1e6)
    assert min(fit.costs().values()) < 0
    found = fit.cost()
    assert found is not None
    assert min(asdict(found).values()) == 0.0
    for rows, ms in ((1, 1.0), (2, 2.5), (3, 4.0)):
        assert found.seconds(StepShape(0, rows)) == pytest.approx(ms / 1e3, rel=0.25)


def test_a_busy_machine_does_not_flatter_the_fit() -> None:
    """A forecast needs the mean of what steps take, not what the fast ones do: here they spread by half."""
    fit = learned(COST, 8000, 0.5, spread=lambda rng, noise: rng.lognormvariate(0, noise))
    found = fit.cost()
    assert found is not None
    shape = StepShape(0, 16, 6000)
    assert found.seconds(shape) == pytest.approx(COST.seconds(shape) * math.exp(0.5**2 / 2), rel=0.1)


def test_the_knee_is_where_the_square_of_the_rows_outweighs_the_fixed_cost() -> None:
    cost = StepCost(fixed_s=0.02, prefill_s=0.0, row_s=0.001, context_s=0.0, crowd_s=2e-4)
    demand = Demand(prompt_tokens=0, output_tokens=100, context_tokens=0, depth_tokens=0)
    best = max(range(1, 65), key=lambda rows: forecast(cost, demand, rows, 64).tokens_per_s)
    assert best == round(math.sqrt(0.02 / 2e-4))


def test_a_life_before_is_a_beginning_that_new_steps_outweigh() -> None:
    fit = CostFit()
    fit.begin_with(COST)
    found = fit.cost()
    assert found is not None
    assert found.seconds(StepShape(0, 8, 2000)) == pytest.approx(COST.seconds(StepShape(0, 8, 2000)), rel=0.02)
    for _ in range(2000):
        fit.learn(StepShape(0, 8, 2000), 0.1e9)
    found = fit.cost()
    assert found is not None
    assert found.seconds(StepShape(0, 8, 2000)) == pytest.approx(0.1, rel=0.12)


def test_most_of_what_is_computed_is_of_the_long_prompts() -> None:
    alike, mixed = Demand.of([(0, 100, 10)] * 2), Demand.of([(0, 20, 10), (0, 180, 10)])
    assert (alike.prompt_tokens, alike.context_tokens, alike.depth_tokens) == (100, 105, 50)
    assert (mixed.prompt_tokens, mixed.context_tokens, mixed.depth_tokens) == (100, 105, 82)
    assert Demand.of([(50, 100, 10)]).depth_tokens == 100, "what was cached is attended to, too"


@pytest.mark.parametrize("rows", [8, 24])
@pytest.mark.parametrize(("prompt", "answer"), [(1000, 100), (400, 300), (100, 60)])
def test_the_forecast_is_what_the_real_scheduler_comes_to(prompt: int, answer: int, rows: int) -> None:
    """From chunks that starve the rows to such as nobody waits for: within a twentieth, over simulated minutes."""
    resolved = engine(kv_blocks=4000, memory_limit_bytes=8 << 30)
    demand = Demand(
        prompt_tokens=prompt, output_tokens=answer, context_tokens=prompt + answer / 2, depth_tokens=prompt / 2
    )

    def draw(rng: random.Random) -> tuple[str, int, int]:
        return "", rng.randint(prompt * 4 // 5, prompt * 6 // 5), rng.randint(answer // 2, answer * 3 // 2)

    mix = Mix(draw=draw)
    for chunk in (16, 40, 90, 400):
        limits = begins(resolved, prefill_chunk=chunk).replaced({"watermark_blocks": 0})
        traffic = synthetic(mix, seed=3, users=rows, longest=4000)
        outcome = Simulation(resolved, limits, COST, traffic, scored_from_s=60).run(60 + 0.6 * (prompt + answer))
        windows = [window for at_s, _, window in outcome.periods if at_s > 60]
        came = sum(window.output_tokens for window in windows) / sum(window.seconds for window in windows)
        assert forecast(COST, demand, rows, chunk).tokens_per_s == pytest.approx(came, rel=0.05), f"chunks of {chunk}"
