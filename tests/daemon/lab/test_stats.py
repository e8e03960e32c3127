"""Statistics: real differences are found, noise is called noise at about the rate that is promised."""

import random

import pytest

from daemon.lab import stats
from tests.daemon.lab import made


@pytest.mark.parametrize(("count", "paired"), [(3, True), (5, True), (4, False), (8, False)])
def test_noise_is_mistaken_for_a_difference_about_one_time_in_twenty(count: int, paired: bool) -> None:
    rng, wrong = random.Random(7), 0
    for _ in range(200):
        old = [rng.lognormvariate(0, 0.1) for _ in range(count)]
        new = [rng.lognormvariate(0, 0.1) for _ in range(count)]
        found = stats.ratio(new, old, paired)
        assert found
        wrong += found.noise is False
    assert wrong <= 22


def test_a_drifting_machine_hides_nothing_from_pairs() -> None:
    drift = [1.0, 1.5, 0.8, 1.2, 2.0]
    old = [100 * d for d in drift]
    new = [110 * d * (1 + 0.005 * (-1) ** n) for n, d in enumerate(drift)]
    paired, apart = stats.ratio(new, old, paired=True), stats.ratio(new, old, paired=False)
    assert paired
    assert apart
    assert paired.noise is False
    assert 1.08 < paired.middle < 1.12
    assert apart.noise is True


def test_one_run_each_says_nothing_about_noise() -> None:
    found = stats.ratio([2.0], [1.0], paired=True)
    assert found == stats.Ratio(pytest.approx(2.0), None, None)
    assert found.noise is None


def test_what_never_varies_differs_for_certain_or_not_at_all() -> None:
    same, other = (stats.ratio([value] * 3, [5.0] * 3, paired=True) for value in (5.0, 6.0))
    assert same
    assert other
    assert (same.noise, other.noise) == (True, False)


def test_nothing_to_divide_by_is_no_ratio() -> None:
    assert stats.ratio([1.0], [0.0], paired=True) is None
    assert stats.ratio([], [1.0], paired=True) is None


@pytest.mark.parametrize("seed", range(8))
def test_a_trend_is_found_under_waves_and_noise(seed: int) -> None:
    rising = stats.trend(made.waves(400, 100, 0.05, seed))
    assert rising
    assert rising.certain
    assert 0.03 < rising.slope < 0.07


def test_a_flat_line_with_one_jump_has_no_trend() -> None:
    points = [(float(n), 100.0 + (30.0 if n == 150 else 0.0)) for n in range(200)]
    found = stats.trend(points)
    assert found
    assert not found.certain
    assert found.slope == 0


def test_too_few_points_are_no_trend() -> None:
    assert stats.trend([(float(n), 1.0) for n in range(7)]) is None
    assert stats.trend([]) is None
