"""The cost of a step is found again from noisy steps, never negative, and its forecast has the knee it should."""

import math
import random

import pytest

from autotune.costmodel import CostFit, Demand, StepCost, forecast, nonnegative
from tests.autotune.engines import COST


def learned(cost: StepCost, steps: int, noise: float, seed: int = 1) -> CostFit:
    rng, fit = random.Random(seed), CostFit()
    for _ in range(steps):
        rows = rng.randint(0, 40)
        prefill = rng.choice([0, 0, 0, 16, 64, 200]) if rows else 64
        context = rows * rng.randint(50, 800) + prefill
        fit.learn(prefill, rows, context, cost.seconds(prefill, rows, context) * rng.gauss(1, noise))
    return fit


def test_coefficients_are_found_again_through_noise() -> None:
    found = learned(COST, 2000, 0.05).cost()
    assert found is not None
    for rows, prefill, context in ((1, 0, 100), (8, 0, 3000), (32, 0, 9000), (8, 64, 3000), (0, 200, 200)):
        assert found.seconds(prefill, rows, context) == pytest.approx(COST.seconds(prefill, rows, context), rel=0.06)
    assert found.prefill_s == pytest.approx(COST.prefill_s, rel=0.06)


def test_nothing_is_claimed_before_there_were_steps() -> None:
    assert learned(COST, 5, 0.0).cost() is None


def test_it_follows_a_machine_that_becomes_slower_and_says_how_wrong_it_is() -> None:
    fit = learned(COST, 3000, 0.02)
    assert fit.error < 0.05
    slow = StepCost(fixed_s=0.04, prefill_s=0.0018, row_s=0.003, context_s=2e-6, crowd_s=2e-5)
    rng = random.Random(2)
    worst = 0.0
    for step in range(6000):
        rows = rng.randint(1, 40)
        if not step % 50:
            fit.cost()
        fit.learn(0, rows, rows * 300, slow.seconds(0, rows, rows * 300))
        worst = max(worst, fit.error)
    found = fit.cost()
    assert worst > 0.2
    assert found is not None
    assert found.seconds(0, 20, 6000) == pytest.approx(slow.seconds(0, 20, 6000), rel=0.1)


def test_no_coefficient_is_negative_even_if_plain_least_squares_would_have_it() -> None:
    xs = [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]
    ys = [1.0, 2.5, 4.0]  # intercept -0.5
    xx = [[sum(x[i] * x[j] for x in xs) for j in range(2)] for i in range(2)]
    xy = [sum(x[i] * y for x, y in zip(xs, ys, strict=True)) for i in range(2)]
    intercept, slope = nonnegative(xx, xy)
    assert intercept == 0.0
    assert slope == pytest.approx(sum(x[1] * y for x, y in zip(xs, ys, strict=True)) / 14, rel=1e-3)


def test_the_knee_is_where_the_square_of_the_rows_outweighs_the_fixed_cost() -> None:
    cost = StepCost(fixed_s=0.02, prefill_s=0.0, row_s=0.001, context_s=0.0, crowd_s=2e-4)
    demand = Demand(prompt_tokens=0, output_tokens=100, context_tokens=0)
    best = max(range(1, 65), key=lambda rows: forecast(cost, demand, rows, 64).tokens_per_s)
    assert best == round(math.sqrt(0.02 / 2e-4))


def test_a_life_before_is_a_beginning_that_new_steps_outweigh() -> None:
    fit = CostFit()
    fit.begin_with(COST)
    found = fit.cost()
    assert found is not None
    assert found.seconds(0, 8, 2000) == pytest.approx(COST.seconds(0, 8, 2000), rel=0.02)
    for _ in range(2000):
        fit.learn(0, 8, 2000, 0.1)
    found = fit.cost()
    assert found is not None
    assert found.seconds(0, 8, 2000) == pytest.approx(0.1, rel=0.12)
