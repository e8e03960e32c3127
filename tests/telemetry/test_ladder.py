"""The memory ladder: the owners sum to the limit, whatever part of it is known."""

from typing import Any

import msgspec

from telemetry import events
from telemetry.fold import Fold
from telemetry.ladder import IN_USE, OWNERS, Ladder, fragmentation, ladder

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


def host(**measured: int) -> events.MemoryReport:
    """An engine on a CPU: 5,000 bytes held, of which 100 nobody booked and 50 lie in the allocator."""
    held = {"anonymous": 4_700, "shared": 0, "file": 300, "unbooked": 100, "allocator_cache": 50}
    booked = {"runtime": 400, "weights": 4_000, "workspace": 100, "kv": 30, "activations": 20}
    return events.MemoryReport(
        at_ns=1, process="engine", device="cpu", booked=booked, measured={**held, **measured}, limit_bytes=20_000
    )


DAEMON = events.MemoryReport(
    at_ns=1,
    process="daemon",
    device="cpu",
    booked={"runtime": 700},
    measured={"anonymous": 600, "shared": 0, "file": 100},
)


def test_gaps_have_names_and_the_daemon_is_runtime() -> None:
    found = known(STEP, host(), DAEMON)
    assert found is not None
    owners = found.owners
    assert sum(owners.values()) == found.limit_bytes == 20_000
    assert (owners["unbooked"], owners["allocator_cache"]) == (100, 50)
    assert owners["runtime"] == 400 + 300 + 700, "before the first booking, the engine's libraries, the daemon"
    assert owners["activations"] == 500, "promised to the largest step"
    assert owners["kv_active"] + owners["kv_cached"] + owners["kv_free"] == 3_000, "promised to the pool"
    assert found.used_bytes == 4_000 + 100 + 500 + 1_400 + 100 + 1_000


def test_activations_are_the_largest_peak_that_was_measured_of_the_last_steps() -> None:
    steps = [msgspec.structs.replace(STEP, memory_peak_bytes=peak) for peak in (120, 0, 90)]
    found = known(*steps, host(), DAEMON)
    assert found is not None
    assert found.owners["activations"] == 120, "not the 500 that the plan keeps"
    assert sum(found.owners.values()) == found.limit_bytes
    few = known(msgspec.structs.replace(STEP, memory_peak_bytes=7), host(), DAEMON)
    assert few is not None
    assert few.owners["activations"] == 20, "what the allocator keeps for the next step is theirs all the same"


def test_neighbours_are_what_of_the_limit_others_hold() -> None:  # case 4
    ours = 5_000 + 700
    for measured, neighbours in (
        ({"host_available": 14_300}, 0),
        ({"host_available": 9_000}, 20_000 - ours - 9_000),
        ({"host_available": 50_000, "cgroup_limit": 20_000, "cgroup_usage": 12_000}, 20_000 - ours - 8_000),
        ({"host_available": 50_000, "cgroup_limit": 20_000, "cgroup_usage": 12_000, "cgroup_cache": 6_300}, 0),
    ):
        found = known(STEP, host(**measured), DAEMON)
        assert found is not None
        assert found.owners["neighbours"] == neighbours, measured
        assert sum(found.owners.values()) == 20_000


def test_two_daemons_on_one_device_are_neighbours_and_each_budget_is_its_own() -> None:  # case 4
    reports = [
        events.MemoryReport(
            at_ns=1,
            process="engine",
            device="cuda:0",
            booked={"weights": mine, "runtime": 100, "kv": 3_000},
            measured={"device_total": 20_000, "device_free": 20_000 - 4_000 - 9_000, "device_used": mine + 3_100},
            limit_bytes=limit,
        )
        for mine, limit in ((900, 6_000), (5_900, 20_000))
    ]
    small, large = (known(STEP, report, DAEMON) for report in reports)
    assert small is not None
    assert large is not None
    assert small.owners["neighbours"] == 0, "its own limit is not touched: the device has as much left"
    assert large.owners["neighbours"] == 20_000 - 9_000 - 7_000
    assert small.owners["weights"] == 900
    assert all(sum(each.owners.values()) == each.limit_bytes for each in (small, large))
    assert small.owners["runtime"] == 100, "the daemon lives elsewhere"


def test_fragmentation_is_what_is_free_outside_the_largest_piece() -> None:  # case 5
    assert fragmentation({"allocator_reserved": 100, "allocator_free": 40, "allocator_largest_free": 10}) == 0.3
    assert fragmentation({"allocator_reserved": 100, "allocator_free": 5, "allocator_largest_free": 10}) == 0
    assert fragmentation({}) is None


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
