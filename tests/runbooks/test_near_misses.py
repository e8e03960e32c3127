"""What looks like a planted fault and is none: hand-made evidence, one step away from the real thing, which
tests/daemon/test_drills.py plants in a real daemon."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from runbooks import check
from runbooks.evidence import Dated, Evidence
from telemetry import events
from telemetry.evidence import ProcessEnd
from telemetry.parts import Sample, StateView, TotalsView
from telemetry.snapshot import Snapshot

NOW_NS = 2000 * 10**9


def incident(kind: str, cause: str, process: str = "engine") -> events.Incident:
    end = ProcessEnd(process=process)
    return events.Incident(at_ns=1, incident_id=f"{kind}-1", kind=kind, cause=cause, summary="", end=end)


def ended(cause: str) -> events.EngineEnded:
    return events.EngineEnded(at_ns=1, engine_id="e", cause=cause, detail="")


def evidence(*past: events.Event, age_seconds: float = 30.0, **parts: Any) -> Evidence:
    shot = Snapshot(at_ns=NOW_NS, unix_seconds=2000.0, model="m", **parts)
    dated = tuple(Dated(age_seconds, event) for event in past)
    return Evidence(source="live", at_ns=NOW_NS, unix_seconds=2000.0, snapshot=shot, past=dated)


def places(seen: Evidence, least: str = "info") -> list[tuple[str, str]]:
    order = events.SEVERITIES
    return [(f.runbook, f.section) for f in check.examine(seen) if order.index(f.severity) >= order.index(least)]


def steps(stranded: Sequence[int]) -> list[events.StepReport]:
    """One a second, the last one now."""
    first = NOW_NS - len(stranded) * 10**9
    return [
        events.StepReport(at_ns=first + (i + 1) * 10**9, step=i, kv_active=40, kv_stranded_blocks=blocks)
        for i, blocks in enumerate(stranded)
    ]


def test_a_leak_that_took_all_memory_is_told_before_the_lack_of_it_and_another_cause_is_no_leak() -> None:
    assert places(evidence(incident("oom", "leak"))) == [("memory_creep", "buy-time"), ("oom", "a-leak")]
    assert places(evidence(incident("oom", "capacity"))) == [("oom", "too-small")]


def test_an_engine_that_moves_again_was_not_restarted() -> None:
    wedged = incident("wedged", "wedged")
    (moved,) = check.examine(evidence(wedged))
    assert "moves again by itself" in moved.summary
    restarted = check.examine(evidence(wedged, ended("wedged")))
    assert "was restarted" in restarted[0].summary
    assert [each.runbook for each in restarted] == ["wedged_engine", "crash_loop"]
    assert places(evidence(wedged, age_seconds=1000.0)) == []


def test_a_life_that_was_killed_whole_is_told_and_not_the_engine_alone_or_one_long_ago() -> None:
    both = incident("killed", "killed", "both")
    assert places(evidence(both)) == [("crash_loop", "the-daemon-died")]
    assert places(evidence(incident("killed", "killed"))) == []
    assert places(evidence(both, age_seconds=1000.0)) == []


def test_a_death_explains_the_requests_that_were_turned_away_meanwhile_and_an_old_one_does_not() -> None:
    for age_seconds, explains in ((30.0, True), (600.0, False)):
        (found,) = check.examine(evidence(ended("killed"), age_seconds=age_seconds))
        assert ("overload" in found.explains) == explains


@pytest.mark.parametrize(
    ("stranded", "found"),
    [
        ([30] * 8, [("kv_pressure", "clients-that-do-not-read")]),
        ([30, 30, 30, 30, 0, 30, 30, 30], []),  # it does read, now and then
        ([0, 0, 0, 0, 0, 0, 30, 30], []),  # a moment
        ([30] * 2, []),  # too little is known
    ],
)
def test_a_client_that_does_not_read_is_told_and_one_that_reads_slowly_is_not(
    stranded: Sequence[int], found: list[tuple[str, str]]
) -> None:
    assert places(evidence(steps=steps(stranded)), "warning") == found


def test_few_blocks_held_by_such_a_client_are_a_remark() -> None:
    assert places(evidence(steps=steps([3] * 8))) == [("kv_pressure", "clients-that-do-not-read")]
    assert places(evidence(steps=steps([3] * 8)), "warning") == []


def test_within_leaves_out_what_was_before_and_keeps_what_to_compare_with() -> None:
    totals = TotalsView(
        finished={}, prompt_tokens=0, cached_prompt_tokens=0, output_tokens=0, preemptions={}, preempted_tokens={},
        restarts={}, telemetry_dropped={"journal": 5},
    )  # fmt: skip
    history = [Sample(at_ns=NOW_NS - n * 10**10, dropped={"journal": 5 if n < 5 else 0}) for n in range(9, -1, -1)]
    seen = evidence(incident("oom", "capacity"), steps=steps([1] * 30), totals=totals, history=history)
    assert {("disk_full", "make-room"), ("oom", "too-small")} < set(places(seen))
    assert places(seen.within(20.0)) == [("kv_pressure", "clients-that-do-not-read")]
    assert len(seen.within(20.0).steps) == 21
    assert len(seen.within(20.0).history) == 3
    assert seen.within(-1.0).history == seen.history[-1:], "nothing is that new: one stays, to compare with"
    assert seen.within(1e6) == replace(seen, snapshot=seen.within(1e6).snapshot)


def record(reason: str, error: str = "") -> events.RequestRecord:
    return events.RequestRecord(
        at_ns=1, request_id=f"{reason}{error}", group_id="g", index=0, model="m", operation="chat", stream=False,
        arrival_ns=0, stages={}, reason=reason, error=error,
    )  # fmt: skip


def test_who_came_before_the_engine_was_ready_was_not_too_much() -> None:
    """A start, with clients that ask again and again meanwhile, is no overload."""
    turned_away = [record("shed", "queue_full")] * 3
    assert places(evidence(*turned_away)) == [("overload", "clients-or-capacity")]
    assert places(evidence(*[record("shed", "engine_not_ready")] * 3000, record("stop"))) == []
    assert places(evidence(*[record("shed", "engine_not_ready")] * 3000, *turned_away)) != []


def test_an_engine_whose_steps_take_ten_seconds_is_slow_and_not_stuck() -> None:
    def seen(silent_s: float, longest_s: float) -> list[tuple[str, str]]:
        state = StateView(daemon="ready", engine="ready", progress_age_ns=int(silent_s * 1e9))
        step = events.StepReport(at_ns=NOW_NS - 10**9, step=1, launch_ns=int(longest_s * 1e9))
        return [place for place in places(evidence(state=state, steps=[step])) if place[0] == "wedged_engine"]

    assert seen(11.0, 0.1) == seen(21.0, 10.0) == [("wedged_engine", "restart")]
    assert seen(11.0, 9.0) == []
    assert seen(31.0, 50.0) == [("wedged_engine", "restart")], "half of the deadline is long enough, whatever was usual"
