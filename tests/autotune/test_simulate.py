"""The simulator runs the real scheduler and pool: a jump changes nothing but the time it takes, accounts agree with
themselves, and what is asked of it is answered."""

import itertools
import struct

import pytest

from autotune.objective import Targets
from autotune.simulate import JumpingScheduler, Outcome, Simulation
from autotune.whatif import Calibration, against, ask, fitted, replicas
from autotune.workload import Job, Replay, Synthetic, synthetic
from engine.budget import Limits, Resolved
from engine.plan import StepPlan
from engine.stepcost import StepShape
from telemetry.events import StepReport
from tests.autotune.engines import COST, begins, engine
from tests.autotune.records import record


class Stepwise(JumpingScheduler):
    """The plain twin: it never jumps."""

    def jump(self, most: int, like: int, now_ns: int) -> tuple[int, int]:
        return 0, 0


def run(
    lengths: str, seconds: float = 200, stepwise: bool = False, rate: float = 1.5, **changes: int | bool
) -> tuple[Outcome, Simulation]:
    resolved = engine(**changes)
    simulation = Simulation(
        resolved, begins(resolved), COST, synthetic(lengths, seed=5, rate=rate, until_s=seconds), noise=0.0
    )
    if stepwise:
        simulation._scheduler = Stepwise(resolved, begins(resolved), output_credit=1 << 40)
    return simulation.run(seconds * 3), simulation


@pytest.mark.parametrize(("lengths", "cache"), [("short", False), ("lognormal", False), ("shared", True)])
def test_jumping_over_identical_steps_changes_no_figure(lengths: str, cache: bool) -> None:
    jumped, one = run(lengths, prefix_cache=cache)
    plain, other = run(lengths, stepwise=True, prefix_cache=cache)
    assert plain.steps == plain.planned_steps
    assert jumped.planned_steps < 0.7 * jumped.steps
    assert jumped.finished == plain.finished == jumped.offered > 200
    assert jumped.output_tokens == plain.output_tokens
    assert jumped.steps == pytest.approx(plain.steps, rel=0.05)  # arrivals fall into other steps
    assert jumped.busy_s == pytest.approx(plain.busy_s, rel=0.05)
    for cells in ("ttft", "gaps", "latency"):
        a, b = getattr(jumped, cells), getattr(plain, cells)
        assert a.count == b.count
        assert a.percentile(50) == pytest.approx(b.percentile(50), rel=0.12)
        assert a.percentile(95) == pytest.approx(b.percentile(95), rel=0.12)
    for simulation in (one, other):
        simulation._scheduler._pool.invariants()
        assert simulation._scheduler.active_blocks == 0


def test_a_row_that_is_free_is_taken_by_who_waits_whether_steps_are_jumped_or_not() -> None:
    """Two rows and sixteen users: jumping on with the one that is left would lose a fifth."""

    def rate(scheduler: type[JumpingScheduler]) -> float:
        resolved = engine()
        limits = begins(resolved, max_num_seqs=2)
        simulation = Simulation(resolved, limits, COST, synthetic("short", seed=6, users=16), noise=0.0)
        simulation._scheduler = scheduler(resolved, limits, output_credit=1 << 40)
        return simulation.run(200).goodput

    assert rate(JumpingScheduler) == pytest.approx(rate(Stepwise), rel=0.03)


def test_every_token_and_request_is_accounted_for_once() -> None:
    outcome, _ = run("lognormal")
    traffic = synthetic("lognormal", seed=5, rate=1.5, until_s=200)
    jobs = list(traffic.arrivals())
    assert outcome.offered == len(jobs) == outcome.finished
    assert outcome.output_tokens == sum(job.output_tokens for job in jobs)
    assert outcome.ttft.count == outcome.latency.count == len(jobs)
    assert outcome.gaps.count == outcome.output_tokens - len(jobs)
    windows = [window for _, _, window in outcome.periods]
    assert sum(w.output_tokens for w in windows) == outcome.output_tokens
    assert sum(w.finished for w in windows) == outcome.finished
    assert sum(w.prefill_tokens for w in windows) == sum(job.prompt_tokens for job in jobs)


def test_a_seed_says_it_all() -> None:
    def once(seed: int) -> tuple[int, float]:
        resolved = engine()
        traffic = synthetic("heavy", seed=seed, rate=1.0, until_s=200)
        outcome = Simulation(resolved, begins(resolved), COST, traffic, seed=seed).run(300)
        return outcome.output_tokens, outcome.busy_s

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_the_prefix_cache_of_the_real_pool_is_at_work() -> None:
    shared, _ = run("shared", prefix_cache=True)
    alone, _ = run("shared", prefix_cache=False)
    assert shared.busy_s < 0.75 * alone.busy_s


def test_overload_is_shed_and_a_closed_loop_never_is() -> None:
    resolved = engine()
    traffic = synthetic("long", seed=1, rate=20.0, until_s=60)
    outcome = Simulation(resolved, begins(resolved), COST, traffic, max_queue=50).run(60)
    assert outcome.shed > 500
    assert outcome.attained < 0.2
    closed = Simulation(resolved, begins(resolved), COST, synthetic("short", seed=1, users=16, until_s=100)).run(100)
    assert closed.shed == 0
    assert closed.busy_s > 95


def test_what_cannot_be_served_whole_is_refused_or_counted_as_truncated() -> None:
    resolved = engine()
    limits = begins(resolved, context_limit=300)
    jobs = [
        Job(at_s=0.0, prompt_tokens=400, output_tokens=5, serial=1),
        Job(at_s=0.1, prompt_tokens=250, output_tokens=100, serial=2, stream=1),
        Job(at_s=0.2, prompt_tokens=100, output_tokens=100, serial=3, stream=2),
    ]
    outcome = Simulation(resolved, limits, COST, Replay(jobs)).run(60)
    assert (outcome.refused, outcome.truncated, outcome.good) == (1, 1, 1)
    assert outcome.good_tokens == 100
    assert outcome.output_tokens == 150


def test_more_is_never_active_than_the_hard_line_allows() -> None:
    resolved = engine()
    limits = begins(resolved).replaced({"watermark_blocks": 0})
    peaks: list[int] = []

    def watch(plan: StepPlan, scheduler: JumpingScheduler) -> None:
        peaks.append(scheduler.active_blocks)

    traffic = synthetic("heavy", seed=3, rate=4.0, until_s=200, longest=8000)
    outcome = Simulation(resolved, limits, COST, traffic, watch=watch).run(200)
    assert limits.kv_blocks == 850 < resolved.kv_blocks
    assert max(peaks) > 800
    assert max(peaks) <= 850
    assert outcome.past_hard_line == 0


def calibration(resolved: Resolved, limits: Limits) -> Calibration:
    return Calibration(resolved=resolved, limits=limits, cost=COST, error=0.0, source="a test")


def test_replicas_are_added_until_the_targets_are_met() -> None:
    resolved = engine()
    jobs = list(itertools.takewhile(lambda j: j.at_s < 300, synthetic("bimodal", seed=2, rate=4.0).arrivals()))
    rows = replicas(calibration(resolved, begins(resolved)), jobs, times=1.0, targets=Targets(ttft_s=5.0))
    assert [row["enough"] for row in rows] == [False] * (len(rows) - 1) + [True]
    assert rows[0]["replicas"] == 1
    assert 2 <= rows[-1]["replicas"] <= 16
    assert rows[0]["attained"] < rows[-1]["attained"]


def test_an_answer_is_compared_with_what_was_recorded() -> None:
    records = [record(n, arrival_s=n, output=50, ttft_s=0.1 + 0.001 * n, gap_s=0.02) for n in range(20)]
    resolved = engine()
    jobs = [Job(at_s=float(n), prompt_tokens=10, output_tokens=50, serial=n, stream=n) for n in range(20)]
    answer = ask(calibration(resolved, begins(resolved)), Replay(jobs), seconds=21, targets=Targets())
    found = against(answer, records, Targets())
    live = found["output_tokens_per_s"]["live"]
    assert live == pytest.approx(1000 / (19 + 0.119 + 49 * 0.02), rel=1e-6)
    assert found["goodput"]["error"] == pytest.approx(abs(answer["goodput"] - live) / live)


def test_reports_of_steps_calibrate_merged_ones_too() -> None:
    reports = []
    for n in range(1, 60):
        prefill, rows = (64 if n % 3 == 0 else 0), 1 + n % 16
        seconds = COST.seconds(StepShape(prefill, rows, rows * 200, prefill * prefill // 2))
        reports.append(
            StepReport(
                at_ns=n,
                step=n,
                merged=2,
                plan_ns=1000,
                collect_ns=int(2 * seconds * 1e9) - 1000,
                prefill_tokens=2 * prefill,
                prefill_rows=2 if prefill else 0,
                decode_rows=2 * rows,
                context_tokens=2 * (rows * 200 + prefill),
                rows=struct.pack("<6i", 0, 0, prefill, 0, 0, prefill),
            )
        )
    found = fitted(reports).cost()
    assert found is not None
    shape = StepShape(64, 8, 1600, 64 * 64 // 2)
    assert found.seconds(shape) == pytest.approx(COST.seconds(shape), rel=0.03)


def test_an_idle_hour_costs_nothing() -> None:
    resolved = engine()
    traffic = Synthetic(mix=synthetic("short", seed=1, users=1).mix, seed=1, users=0)
    outcome = Simulation(resolved, begins(resolved), COST, traffic).run(3600)
    assert (outcome.steps, outcome.busy_s, len(outcome.periods)) == (0, 0.0, 720)
    assert all(window.idle for _, _, window in outcome.periods)
