"""The Steps screen's cost model: it expects of a report what the engine's own fit expected of its plan."""

import msgspec
import pytest

from engine.plan import PlanWhy, SeqSlice, StepPlan, StepResult
from engine.report import StateFacts, StepTimes, merged, step_report
from engine.stepcost import NAMES, CostFit, StepShape
from telemetry.events import StepReport
from telemetry.parts import TimeBreakdown
from telemetry.snapshot import Snapshot
from tests.tui.driving import recorded, settled, shown
from tui.costmodel import Model, taken_ns
from tui.screens.steps import lanes, outliers, table
from tui.text import plain
from tui.view import Frame, View

COSTS = dict(zip(NAMES, (2e6, 3e4, 1e5, 40.0, 5.0, 900.0), strict=True))
MODEL = Model.of({**COSTS, "error_ratio": 0.1})
IDLE = StateFacts(running=1, waiting=0, preempted=0, kv_active=1, kv_cached=0, kv_free=1, kv_tail_slots=0,
                  kv_stranded_blocks=0)  # fmt: skip


class Fitted(CostFit):
    """A fit that has come to COSTS."""

    def expect_ns(self, shape: StepShape) -> float:
        rows = shape.decode_rows
        counts = (1, shape.prefill_tokens, rows, shape.context_tokens, shape.prefill_pairs, rows * rows)
        return sum(cost * count for cost, count in zip(COSTS.values(), counts, strict=True))


def plan(number: int, decoding: int, chunk: int = 0) -> StepPlan:
    slices = [SeqSlice(row, 99, 1) for row in range(decoding)]
    slices += [SeqSlice(decoding, 50, chunk)] if chunk else []
    why = PlanWhy(
        prefill_rows=1 if chunk else 0,
        decode_rows=decoding,
        prefill_tokens=chunk,
        decode_tokens=decoding,
        context_tokens=sum(piece.start + piece.count for piece in slices),
    )
    return StepPlan(number, tuple(slices), why=why)


def report(of: StepPlan, took_ns: int, bound: str = "") -> StepReport:
    times = StepTimes(begun_ns=0, planned_ns=0, launched_ns=0, collected_ns=took_ns, committed_ns=took_ns, publish_ns=7)
    return step_report(of, StepResult(of.step, ()), times, IDLE, finished=(), gaps_ns=(), bound=bound)


PLANS = (plan(1, decoding=4), plan(2, decoding=3, chunk=64), plan(3, decoding=0, chunk=300))


@pytest.mark.parametrize("of", PLANS)
def test_it_expects_what_the_engine_expects(of: StepPlan) -> None:
    assert MODEL is not None
    expected = Fitted().expect_ns(StepShape.of(of))
    seen = report(of, took_ns=int(2 * expected))
    assert MODEL.expected_ns(seen) == pytest.approx(expected)
    assert MODEL.times(seen) == pytest.approx(2.0)
    assert taken_ns(seen) == int(2 * expected), "without the publication, which the fit does not know"


def test_of_merged_reports_it_expects_the_mean() -> None:
    assert MODEL is not None
    first, then = (report(of, took_ns=1000) for of in PLANS[1:])
    both = merged(first, then)
    assert MODEL.expected_ns(both) == pytest.approx((MODEL.expected_ns(first) + MODEL.expected_ns(then)) / 2, rel=1e-3)


def test_without_a_fit_or_with_anothers_there_is_no_model() -> None:
    assert Model.of(None) is None and Model.of({}) is None and Model.of({"fixed_ns": 1.0}) is None


def test_a_long_step_is_no_outlier_if_that_was_to_be_expected() -> None:
    """A prompt's step takes ten times as long as the others, which is its kind; a late one is late for its kind."""
    assert MODEL is not None
    usual = [report(plan(n, decoding=1), int(MODEL.expected_ns(report(plan(n, decoding=1), 1)))) for n in range(20)]
    prompt = report(plan(20, decoding=1, chunk=900), 0)
    prompt = report(plan(20, decoding=1, chunk=900), int(MODEL.expected_ns(prompt)))
    late = report(plan(21, decoding=1), 4 * int(taken_ns(usual[0])))
    assert outliers([*usual, prompt, late], MODEL) == {21}
    assert outliers([*usual, prompt, late]) == {20, 21}, "the median does not know kinds"
    wild = Model(MODEL.costs, error_ratio=0.9)
    assert outliers([*usual, prompt, late], wild) == {20, 21}, "nor does a fit that is wrong itself"


def test_lanes_and_list_show_it() -> None:
    assert MODEL is not None
    view = View()
    shares = TimeBreakdown(
        window_seconds=60, stages={}, step_phases={}, step_seconds=1.0, step_cost={**COSTS, "error_ratio": 0.1}
    )
    reports = [report(plan(n, decoding=2), 2_500_000, "bandwidth") for n in range(1, 10)]
    late = report(plan(10, decoding=2), 50_000_000, "overhead")
    shot = Snapshot(at_ns=1, unix_seconds=1.0, model="m", time_breakdown=shares, steps=[*reports, late])
    view.take(Frame(at_ns=1, snapshot=shot))
    drawn = "\n".join(plain(row) for row in lanes(view, 100))
    assert "expected" in drawn and "these steps took 3.28× what it expects; off by 10 %; 30 µs a prompt token" in drawn
    assert "bandwidth 9" in drawn and "overhead 1" in drawn
    listed = table(view, outliers(list(view.steps), MODEL))
    assert "22.6×" in plain(listed.line(late, 160)) and "overhead: collect took it" in plain(listed.line(late, 160))
    assert "1.1×" in plain(listed.line(reports[0], 80)) and "bandwidth" in plain(listed.line(reports[0], 80))


async def test_the_screen_says_where_there_is_no_model() -> None:
    frames = recorded("healthy")
    last = frames[-1].snapshot
    assert last is not None and last.time_breakdown is not None
    bare = msgspec.structs.replace(last.time_breakdown, step_cost=None)
    shot = msgspec.structs.replace(last, time_breakdown=bare)
    async with shown([*frames[:-1], Frame(at_ns=frames[-1].at_ns, snapshot=shot)], (80, 24)) as (_, pilot):
        await pilot.press("4")
        assert "cost model not reported" in await settled(pilot, "Lanes by phase")
