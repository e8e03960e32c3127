"""The fitted cost of a step: it finds the costs behind the times, keeps them, and tells stall and bound from them."""

import math
import random

import pytest

from engine.plan import PlanWhy, SeqSlice, StepPlan
from engine.stepcost import NAMES, Ceilings, CostFit, StepMeter, StepShape

TRUE = {
    "fixed_ns": 5e6,
    "prefill_token_ns": 2e4,
    "decode_row_ns": 1e5,
    "context_token_ns": 20.0,
    "prefill_pair_ns": 3.0,
    "row_squared_ns": 2e3,
}


def true_ns(shape: StepShape) -> float:
    counts = (
        1,
        shape.prefill_tokens,
        shape.decode_rows,
        shape.context_tokens,
        shape.prefill_pairs,
        shape.decode_rows**2,
    )
    return sum(TRUE[name] * count for name, count in zip(NAMES, counts, strict=True))


def traffic(seed: int, steps: int) -> list[StepShape]:
    chance = random.Random(seed)
    shapes = []
    for _ in range(steps):
        rows, prefill = chance.randrange(1, 40), chance.choice((0, 0, 0, chance.randrange(2, 500)))
        shapes.append(StepShape(prefill, rows, rows * chance.randrange(10, 4000), prefill * chance.randrange(1, 2000)))
    return shapes


def learned(shapes: list[StepShape], noise: float = 0.05, outliers: float = 0.01) -> CostFit:
    cost, chance = CostFit(), random.Random(7)
    for shape in shapes:
        slow = 20 if chance.random() < outliers else 1
        cost.learn(shape, int(true_ns(shape) * chance.lognormvariate(0, noise) * slow))
    return cost


def test_it_finds_the_costs_through_noise() -> None:
    cost = learned(traffic(1, 2000), outliers=0)
    for name, value in cost.costs().items():
        assert value == pytest.approx(TRUE[name], rel=0.3), name
    assert 0.02 < cost.error_ratio < 0.1


def test_outliers_hardly_move_what_it_expects() -> None:
    cost = learned(traffic(1, 2000))
    for shape in traffic(9, 200):
        assert cost.expect_ns(shape) == pytest.approx(true_ns(shape), rel=0.12), shape
    assert 0.02 < cost.error_ratio < 0.3


def test_long_monotony_forgets_nothing_and_blows_nothing_up() -> None:
    same = StepShape(0, 8, 8000, 0)
    cost = learned([*traffic(2, 2000), *[same] * 20_000])
    mixed = StepShape(300, 8, 8000, 45_000)
    assert cost.expect_ns(mixed) == pytest.approx(true_ns(mixed), rel=0.15)
    assert cost.error_ratio < 0.15


def test_it_follows_when_the_machine_becomes_slower() -> None:
    cost = learned(traffic(3, 500))
    for shape in traffic(4, 1500):
        cost.learn(shape, int(2 * true_ns(shape)))
    shape = traffic(5, 1)[0]
    assert cost.expect_ns(shape) == pytest.approx(2 * true_ns(shape), rel=0.15)


def test_it_follows_a_slower_machine_while_all_steps_are_alike() -> None:
    """What such steps say nothing about may not stop the fit from forgetting what they do."""
    cost, same, chance = CostFit(), StepShape(0, 8, 1600, 0), random.Random(4)
    for n in range(12_000):
        cost.learn(same, true_ns(same) * (1.0 if n < 10_000 else 1.5) * chance.lognormvariate(0, 0.05))
    assert cost.expect_ns(same) == pytest.approx(1.5 * true_ns(same), rel=0.05)


@pytest.mark.parametrize("seed", range(8))
def test_hardly_ever_other_rows_are_no_knee(seed: int) -> None:
    """Eight rows and, now and then, one less say nothing of a row squared: what thirty take is told by their number."""
    cost, chance = CostFit(2000), random.Random(seed)
    for _ in range(150):
        rows, prefill = 8 - (chance.random() < 0.2), chance.choice((0, 0, 24))
        shape = StepShape(prefill, rows, rows * chance.randrange(120, 250), prefill * chance.randrange(12, 150))
        cost.learn(shape, (20e6 + 2.3e6 * rows + 1.9e6 * prefill) * chance.lognormvariate(0, 0.08))
    known = cost.cost()
    assert known
    assert known.seconds(StepShape(0, 30, 30 * 180)) == pytest.approx(0.089, rel=0.25)


def decode(rows: int, context: int) -> StepPlan:
    slices = tuple(SeqSlice(row, context - 1, 1) for row in range(rows))
    return StepPlan(1, slices, why=PlanWhy(decode_rows=rows, decode_tokens=rows, context_tokens=rows * context))


def mixed(rows: int, context: int, chunk: int, start: int = 0) -> StepPlan:
    plain = decode(rows, context)
    why = PlanWhy(decode_rows=rows, prefill_rows=1, prefill_tokens=chunk, context_tokens=rows * context + start + chunk)
    return StepPlan(1, (*plain.slices, SeqSlice(rows, start, chunk)), why=why)


def test_the_shape_of_a_plan() -> None:
    assert StepShape.of(decode(3, 100)) == StepShape(0, 3, 300, 0)
    assert StepShape.of(mixed(3, 100, 10, start=20)) == StepShape(10, 3, 300, 10 * 50 // 2)
    assert StepShape.of(mixed(3, 100, 10, start=20)).decode_only == StepShape(0, 3, 300, 0)


def test_stall_is_what_mixed_steps_take_beyond_decode_only_ones() -> None:
    meter = StepMeter()
    meter.step(mixed(4, 100, 50), 10_000_000, 0)
    assert meter.stall_ns == 0, "nothing to compare with yet"
    chance = random.Random(3)
    for _ in range(200):
        for plan in (decode(chance.randrange(1, 9), chance.randrange(50, 500)), mixed(4, 100, chance.randrange(2, 80))):
            meter.step(plan, int(true_ns(StepShape.of(plan))), 0)
    before = meter.stall_ns
    plan = mixed(4, 100, 60)
    meter.step(plan, int(true_ns(StepShape.of(plan))), 0)
    whole, alone = true_ns(StepShape.of(plan)), true_ns(StepShape.of(plan).decode_only)
    assert meter.stall_ns - before == pytest.approx(whole - alone, rel=0.1)
    before = meter.stall_ns
    meter.step(StepPlan(1, (SeqSlice(0, 0, 50),), why=PlanWhy(prefill_rows=1, context_tokens=50)), 10**9, 0)
    assert meter.stall_ns == before, "nobody was decoding"


@pytest.mark.parametrize(
    ("weights_bytes", "plan", "host_ns", "bound"),
    [
        (400_000_000, decode(2, 100), 100_000, "bandwidth"),  # 4 ms of 5 at 100 GB/s
        (1_000, mixed(2, 100, 600), 100_000, "compute"),  # 12 ms of tokens
        (1_000, decode(2, 100), 4_900_000, "overhead"),  # the fixed cost is nothing that memory explains
    ],
)
def test_what_bound_a_step(weights_bytes: int, plan: StepPlan, host_ns: int, bound: str) -> None:
    meter = StepMeter(Ceilings(bytes_per_ns=100.0, weights_bytes=weights_bytes, context_token_bytes=100))
    assert meter.step(plan, int(true_ns(StepShape.of(plan))), 900_000) == "", "nothing is known yet"
    for shape in traffic(6, 1500):
        meter.cost.learn(shape, int(true_ns(shape)))
    step_ns = int(true_ns(StepShape.of(plan)))
    assert meter.step(plan, step_ns, max(1, step_ns - host_ns)) == bound


def test_without_a_measured_ceiling_nothing_is_claimed() -> None:
    meter = StepMeter()
    for _ in range(50):
        assert meter.step(decode(2, 100), 1_000_000, 900_000) == ""


def test_no_sequence_of_steps_breaks_the_fit() -> None:
    """Shapes that appear late, times that fall to nothing, a fit that expects nothing at all."""
    for seed in range(200):
        random_ = random.Random(seed)
        cost = CostFit()
        for _ in range(300):
            shape = StepShape(*(random_.choice((0, 0, random_.randrange(5000))) for _ in range(4)))
            cost.learn(shape, int(10 ** random_.uniform(0, random_.choice((1, 6, 11)))))
        assert all(math.isfinite(value) for value in cost.costs().values())
        assert math.isfinite(cost.expect_ns(StepShape(64, 8, 4000, 900)))
    cheap = CostFit()
    for _ in range(40):
        cheap.learn(StepShape(0, 1, 10, 0), 1_000_000)
    cheap._costs = [-1.0] * len(cheap._costs)  # negative by a fit that prefill had pushed
    cheap.error_ratio = 0.0
    cheap.learn(StepShape(0, 16, 10, 0), 1_000_000)
    assert cheap.expect_ns(StepShape(0, 16, 10, 0)) > 0
