"""The fold: counts are exact, stages sum, nothing goes back, nothing a client sends grows a series."""

import random
import struct
from typing import Any

import numpy as np
import pytest

from telemetry import events
from telemetry.exposition import Exposition
from telemetry.fold import Fold
from telemetry.state import KEPT_RECORDS
from telemetry.stats import Histogram, Window

S = 1_000_000_000


def record(request_id: str = "r", **changes: Any) -> events.RequestRecord:
    facts: dict[str, Any] = {
        "at_ns": 10 * S,
        "request_id": request_id,
        "group_id": request_id,
        "index": 0,
        "model": "anything",
        "operation": "chat",
        "stream": True,
        "arrival_ns": 8 * S,
        "stages": {"queue": S // 2, "prefill": S // 2, "decode": S},
        "reason": "stop",
        "prompt_tokens": 30,
        "output_tokens": 11,
        "queued_ns": 8 * S,
        "scheduled_ns": 8 * S + S // 2,
        "first_token_ns": 9 * S,
        "last_token_ns": 10 * S,
    }
    return events.RequestRecord(**{**facts, **changes})


def status(**changes: Any) -> events.EngineStatus:
    facts: dict[str, Any] = {
        "at_ns": S,
        "state": "ready",
        "progress_ns": S,
        "steps": 1,
        "limits": events.LimitsView(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            prefill_chunk=64,
            max_partial_prefills=1,
            context_limit=512,
            kv_blocks=64,
            spec_depth=0,
        ),
        "sizes": {},
    }
    return events.EngineStatus(**{**facts, **changes})


def started(restarts: int = 0) -> events.EngineStarted:
    return events.EngineStarted(
        at_ns=S,
        engine_id="e",
        pid=1,
        restarts=restarts,
        phases={},
        resolved={"block_size": 16},
        reasons={},
        limits=status().limits,
    )


def gaps(*seconds: float) -> bytes:
    return struct.pack(f"<{len(seconds)}I", *(round(gap * 1e6) for gap in seconds))


def test_ttft_counts_the_choices_that_had_a_token() -> None:
    fold, chance = Fold("m"), random.Random(1)
    with_token = 0
    for i in range(200):
        reason = chance.choice(events.FINISH_REASONS)
        if chance.random() < 0.7 and reason not in ("shed", "rejected"):
            with_token += 1
            fold.take([events.FirstToken(at_ns=9 * S, request_id=f"{i}", ttft_ns=S)])
        fold.take([record(f"{i}", reason=reason)])
    with fold.reading() as state:
        assert state.ttft.count == with_token
        assert sum(state.finished.values()) == 200


def test_every_end_is_counted_once_and_only_served_ones_have_a_latency() -> None:
    fold = Fold("m")
    fold.take([record(reason, reason=reason) for reason in events.FINISH_REASONS])
    with fold.reading() as state:
        assert state.finished == dict.fromkeys(events.FINISH_REASONS, 1)
        assert state.latency.count == len(events.FINISH_REASONS) - 2
        assert state.output_tokens == 11 * state.latency.count


def test_stages_sum_to_the_requests_time() -> None:
    fold, chance = Fold("m"), random.Random(2)
    total = 0
    for i in range(300):
        stages = {stage: chance.randrange(1, S) for stage in chance.sample(events.STAGES, chance.randrange(1, 9))}
        total += sum(stages.values())
        fold.take([record(f"{i}", stages=stages, arrival_ns=10 * S - sum(stages.values()))])
    with fold.reading() as state:
        assert sum(h.sum for h in state.stages.values()) == pytest.approx(total / S)
        assert state.latency.sum == pytest.approx(total / S)


def test_vllm_intervals_begin_and_end_where_its_documentation_says() -> None:
    fold = Fold("m")
    fold.take([record()])
    with fold.reading() as state:
        assert [h.sum for h in (state.queued, state.prefilled, state.decoded, state.inferred)] == [0.5, 0.5, 1.0, 1.5]
        assert state.per_token.sum == pytest.approx(0.1)  # one second for the ten gaps of eleven tokens


def test_the_longest_of_n_choices_counts_once_per_request() -> None:
    fold = Fold("m")
    fold.take([record(f"a{i}", group_id="a", n=3, index=i, output_tokens=n) for i, n in enumerate((5, 70, 9))])
    fold.take([record("b", output_tokens=4)])
    with fold.reading() as state:
        assert (state.longest_outputs.count, state.longest_outputs.sum) == (2, 74)
        assert (state.choices.count, state.choices.sum) == (2, 4)
    assert fold.sizes()["fold_groups"] == 0


def test_a_merged_report_counts_like_the_steps_it_stands_for() -> None:
    one = events.StepReport(at_ns=S, step=1, plan_ns=10, collect_ns=30, decode_tokens=4, bound="bandwidth", running=4)
    two = events.StepReport(
        at_ns=S, step=2, merged=2, plan_ns=20, collect_ns=60, decode_tokens=8, bound="bandwidth", running=4
    )
    apart, together = Fold("m"), Fold("m")
    apart.take([one, one])
    together.take([two])
    with apart.reading() as a, together.reading() as b:
        for phase in events.STEP_PHASES:
            assert a.phases[phase].counts == b.phases[phase].counts
            assert a.phases[phase].sum == pytest.approx(b.phases[phase].sum)
        assert a.step_tokens == b.step_tokens
        assert a.iteration_tokens.counts == b.iteration_tokens.counts
        assert a.bound == b.bound
        assert a.queue == b.queue


def test_gaps_are_counted_exactly() -> None:
    fold, chance = Fold("m"), random.Random(5)
    values = [chance.uniform(0.0001, 3) for _ in range(1000)]
    for i in range(0, 1000, 50):
        fold.take([events.StepReport(at_ns=S, step=i, gaps_us=gaps(*values[i : i + 50]))])
    plain = Histogram(fold._state.gap.bounds)
    for value in values:
        plain.add(round(value * 1e6) / 1e6)
    with fold.reading() as state:
        assert state.gap.counts == plain.counts
        assert state.gap.sum == pytest.approx(plain.sum)


def test_counters_do_not_go_back_when_the_engine_is_restarted() -> None:
    fold = Fold("m", clock=lambda: 5 * S)
    step = events.StepReport(at_ns=S, step=1, decode_tokens=5, preemptions=(events.Preempted("r", 9, "kv"),))
    fold.take([started(), step, status(cpu_ns=4 * S, telemetry_dropped=3, running=2, kv_active=5)])
    fold.take([events.EngineEnded(at_ns=2 * S, engine_id="e", cause="killed", detail="signal 9")])
    with fold.reading() as state:
        assert (state.queue.running, state.blocks, state.progress_ns) == (0, None, None)
        assert sum(state.restarts.values()) == 0  # not yet started again
    fold.take([status(cpu_ns=S, telemetry_dropped=1), started(1), step, status(cpu_ns=2 * S, telemetry_dropped=1)])
    with fold.reading() as state:
        assert state.step_tokens["decode"] == 10
        assert (state.preemptions["kv"], state.preempted_tokens["kv"]) == (2, 18)
        assert (state.engine_dropped, state.engine_cpu_ns) == (4, 6 * S)
        assert {cause: n for cause, n in state.restarts.items() if n} == {"killed": 1}


def test_a_restart_counts_even_if_the_engine_dies_before_it_is_ready() -> None:
    """A crash loop is seen by its alert although no engine of it ever starts to serve."""
    fold = Fold("m")
    fold.take([started()])
    for at_s, cause in enumerate(("crash", "crash", "oom_killed", "drained"), start=2):
        fold.take([events.EngineEnded(at_ns=at_s * S, engine_id="e", cause=cause, detail="")])
    fold.take([started()])  # after an orderly end: no restart
    with fold.reading() as state:
        assert {cause: n for cause, n in state.restarts.items() if n} == {"crash": 2, "oom_killed": 1}


def test_an_idle_engine_has_no_waiting_reasons_and_no_tail() -> None:
    fold = Fold("m")
    busy = {"running": 2, "waiting": 3, "waiting_kv": 3, "kv_active": 9, "kv_free": 1, "kv_tail_slots": 8}
    fold.take([events.StepReport(at_ns=S, step=1, **busy), status(kv_cached=4, kv_free=6)])
    with fold.reading() as state:
        assert (state.queue.running, state.queue.waiting, state.queue.kv) == (0, 0, 0)
        assert state.blocks is not None
        assert (state.blocks.active, state.blocks.cached, state.blocks.tail_slots) == (0, 4, 0)


def test_strings_of_clients_add_no_series_and_no_memory() -> None:
    fold = Fold("m")
    exposition = Exposition(fold)
    fold.take([record("first"), events.FirstToken(at_ns=S, request_id="first", ttft_ns=1)])

    def series() -> int:
        return sum(1 for line in exposition.render()[0].splitlines() if not line.startswith(b"#"))

    before = series()
    for i in range(10_000):
        name = f"name-{i}"
        fold.take([record(name, model=name, group_id=name, error=name, operation=name, stages={name: 1}, reason=name)])
        fold.take(
            [events.LoopLag(at_ns=1, loop=name, lags_us=(1,)), events.FirstToken(at_ns=1, request_id=name, ttft_ns=1)]
        )
        fold.take([events.Incident(at_ns=1, incident_id=name, kind=name, cause=name, summary=name)])
    assert series() == before
    assert exposition.row_errors == 0
    assert fold.sizes()["fold_records"] == KEPT_RECORDS
    assert b"name-" not in exposition.render()[0]


def test_records_are_found_by_choice_and_by_http_request() -> None:
    fold = Fold("m")
    fold.take([record("c-0", group_id="g"), record("c-1", group_id="g", index=1)])
    assert fold.record("c-1") == record("c-1", group_id="g", index=1)
    assert fold.record("g") == record("c-0", group_id="g")
    assert fold.record("nobody") is None


def test_a_broken_event_is_counted_and_the_rest_is_folded() -> None:
    fold = Fold("m")
    broken = record("x", stages={"decode": "long"})
    fold.take([broken, record("y")])
    with fold.reading() as state:
        assert state.unfolded == 1
        assert "y" in state.records


@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_percentiles_of_the_window_are_those_of_numpy(spread: float) -> None:
    values = np.random.default_rng(4).lognormal(-3, spread, 5000)
    window, now = Window(60), 1000 * S
    for i, value in enumerate(values):
        window.observe(now - (i % 60) * S, "x", (float(value),))
    window.observe(now - 62 * S, "x", (1e6,))  # too old
    count, found = window.percentiles(now, "x", (1, 50, 90, 95, 99, 100))
    expected = np.percentile(values, (1, 50, 90, 95, 99, 100), method="inverted_cdf")
    assert count == 5000
    assert found == pytest.approx(expected, rel=0.006)


def test_a_batch_and_its_values_one_by_one_are_the_same_to_a_window() -> None:
    values = sorted(float(v) for v in np.random.default_rng(6).lognormal(-3, 1, 2000))
    batch, single = Window(), Window()
    batch.observe(S, "x", values)
    for value in values:
        single.observe(S, "x", (value,))
    points = (5, 50, 99)
    assert batch.percentiles(S, "x", points)[1] == pytest.approx(single.percentiles(S, "x", points)[1], rel=0.011)
    assert batch.percentiles(S, "x", points)[0] == 2000


def test_a_window_forgets() -> None:
    window = Window(60)
    for second in range(500):
        window.count(second * S, "n", 1)
    assert window.sums(499 * S)["n"] == 60
    assert window.span_seconds(499 * S) == 60
    assert window.sums(600 * S) == {}


def test_a_young_window_knows_how_young_it_is() -> None:
    window = Window(60)
    assert window.span_seconds(5 * S) == 1
    window.count(100 * S, "n", 1)
    assert window.span_seconds(110 * S) == 10


def test_a_finding_is_shown_while_it_holds() -> None:
    fold = Fold("tiny")

    def finding(runbook: str, summary: str, active: bool = True) -> events.Finding:
        return events.Finding(
            at_ns=1, runbook=runbook, severity="warning", summary=summary, evidence={}, next_step="", active=active
        )

    fold.take([finding("oom", "once"), finding("overload", "429"), finding("oom", "twice")])
    with fold.reading() as state:
        assert [each.summary for each in state.findings.values()] == ["429", "twice"]
    fold.take([finding("oom", "over", active=False), finding("disk_full", "never was", active=False)])
    with fold.reading() as state:
        assert list(state.findings) == ["overload"]
