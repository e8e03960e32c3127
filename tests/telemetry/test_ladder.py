"""The memory ladder: the owners sum to the limit, whatever part of it is known."""

from typing import Any

from telemetry import events
from telemetry.fold import Fold
from telemetry.ladder import IN_USE, OWNERS, Ladder, ladder

LIMITS = events.LimitsView(
    max_num_seqs=1,
    max_num_batched_tokens=1,
    prefill_chunk=1,
    max_partial_prefills=1,
    context_limit=1,
    kv_blocks=1,
    spec_depth=0,
)
PLAN = {
    "device": "cpu",
    "memory_limit_bytes": 10_000,
    "weights_bytes": 4_000,
    "activation_bytes": 500,
    "workspace_bytes": 100,
    "runtime_bytes": 900,
    "kv_blocks": 30,
    "kv_block_bytes": 100,
}


def known(*also: events.Event, **resolved: Any) -> Ladder | None:
    fold = Fold("m")
    fold.take(
        [
            events.EngineStarted(
                at_ns=1,
                engine_id="e",
                pid=1,
                restarts=0,
                phases={},
                resolved={**PLAN, **resolved},
                reasons={},
                limits=LIMITS,
            ),
            *also,
        ]
    )
    with fold.reading() as state:
        return ladder(state)


STEP = events.StepReport(at_ns=1, step=1, kv_active=10, kv_cached=5, kv_free=15)


def test_the_names_are_those_of_the_metric() -> None:
    assert set(IN_USE) < set(OWNERS)


def test_the_plan_sums_to_the_limit() -> None:
    found = known(STEP)
    assert found is not None
    assert (found.source, found.device) == ("plan", "cpu")
    assert sum(found.owners.values()) == found.limit_bytes == 10_000
    assert (found.owners["kv_active"], found.owners["kv_cached"], found.owners["kv_free"]) == (1000, 500, 1500)
    assert found.used_bytes == 4000 + 500 + 100 + 900 + 1000
    assert found.reserved_bytes == found.used_bytes + 2000


def test_before_the_first_step_the_pool_is_free() -> None:
    found = known()
    assert found is not None
    assert found.owners["kv_free"] == 3000
    assert "kv_active" not in found.owners


def test_a_ledger_that_reports_is_believed() -> None:
    report = events.MemoryReport(
        at_ns=1,
        process="engine",
        device="cuda:0",
        booked={"weights": 4200, "unheard_of": 1},
        measured={},
        limit_bytes=9000,
    )
    found = known(STEP, report)
    assert found is not None
    assert (found.source, found.device, found.owners["weights"]) == ("ledger", "cuda:0", 4200)
    assert sum(found.owners.values()) == 9000
    assert "unheard_of" not in found.owners


def test_more_than_the_limit_is_a_negative_headroom() -> None:
    found = known(memory_limit_bytes=5000)
    assert found is not None
    assert found.owners["headroom"] == -3500


def test_without_a_limit_there_is_no_headroom() -> None:
    found = known(memory_limit_bytes=0)
    assert found is not None
    assert found.limit_bytes is None
    assert "headroom" not in found.owners


def test_without_an_engine_nothing_is_known() -> None:
    assert known(events.EngineEnded(at_ns=2, engine_id="e", cause="killed", detail="")) is None
    fold = Fold("m")
    with fold.reading() as state:
        assert ladder(state) is None
