"""The snapshot: the parts that were asked for, and 'not reported' for what nobody knows."""

import struct

import msgspec
import pytest

from telemetry import account as accounts
from telemetry import events, snapshot
from telemetry.fold import Fold
from telemetry.snapshot import PARTS, Snapshot, Views, build

S = 1_000_000_000


def busy_fold() -> Fold:
    fold = Fold("smollm2", clock=lambda: 100 * S)
    limits = events.LimitsView(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        prefill_chunk=64,
        max_partial_prefills=1,
        context_limit=512,
        kv_blocks=64,
        spec_depth=0,
    )
    fold.take(
        [
            events.StateChanged(at_ns=S, state="ready", why="the model is loaded"),
            events.EngineStarted(
                at_ns=S,
                engine_id="e1",
                pid=7,
                restarts=0,
                phases={"load": S},
                resolved={"block_size": 16, "kv_blocks": 64, "kv_block_bytes": 1000, "weights_bytes": 5000},
                reasons={"kv_blocks": "what was left"},
                limits=limits,
            ),
            *(
                events.StepReport(
                    at_ns=(90 + i) * S,
                    step=i,
                    plan_ns=S // 10,
                    collect_ns=3 * S // 10,
                    kv_active=4,
                    kv_free=60,
                    kv_tail_slots=8,
                    running=1,
                    gaps_us=struct.pack("<I", 20_000),
                )
                for i in range(5)
            ),
            *(
                events.RequestRecord(
                    at_ns=95 * S,
                    request_id=f"r{i}",
                    group_id=f"r{i}",
                    index=0,
                    model="smollm2",
                    operation="chat",
                    stream=True,
                    arrival_ns=91 * S,
                    stages={"queue": S, "decode": 3 * S},
                    reason="stop",
                )
                for i in range(40)
            ),
            events.TargetsMissed(at_ns=99 * S, missed={"ttft_s": "p95 0.9 s"}),
        ]
    )
    return fold


def test_every_part_of_the_snapshot_can_be_asked_for_alone() -> None:
    names = set(Snapshot.__struct_fields__) - {"at_ns", "unix_seconds", "model"}
    assert names == set(PARTS)
    fold = busy_fold()
    for name in PARTS:
        shot = build(fold, [name], Views(versions={"inferd": "1"}, config={"device": "cpu"}, history=[]))
        assert [other for other in PARTS if getattr(shot, other) is not None] == [name]


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(ValueError, match="colour"):
        build(busy_fold(), ["colour"])


def test_it_survives_json() -> None:
    shot = build(
        busy_fold(), views=Views(block_map=b"\x00\x01\xff", live_requests=[{"request_id": "a", "state": "running"}])
    )
    assert snapshot.decode(snapshot.encode(shot)) == shot


def test_a_snapshot_of_another_version_is_still_read() -> None:
    assert snapshot.decode(b'{"at_ns":1,"unix_seconds":2.0,"model":"m","novelty":[1]}').model == "m"


def test_nothing_known_is_not_reported_rather_than_zero() -> None:
    shot = build(Fold("m"))
    assert shot.state is not None
    assert shot.kv is not None
    assert shot.memory is not None
    assert shot.latency is not None
    assert (shot.state.engine, shot.state.progress_age_ns, shot.limits, shot.ceilings) == (None, None, None, None)
    assert (shot.kv.active, shot.kv.tail_ratio, shot.memory.limit_bytes) == (None, None, None)
    assert (shot.latency.ttft.count, shot.latency.ttft.p50) == (0, None)


def test_shares_of_the_last_minute_sum_to_one() -> None:
    shot = build(busy_fold(), ["time_breakdown"])
    assert shot.time_breakdown is not None
    assert shot.time_breakdown.stages == pytest.approx({"queue": 0.25, "decode": 0.75})
    assert sum(shot.time_breakdown.step_phases.values()) == pytest.approx(1)
    assert shot.time_breakdown.step_seconds == pytest.approx(2)


def test_latency_kv_memory_and_requests_say_what_the_events_said() -> None:
    shot = build(busy_fold(), views=Views(live_requests=[{"request_id": "a", "state": "waiting", "extra": 1}]))
    assert shot.latency is not None
    assert shot.kv is not None
    assert shot.memory is not None
    assert shot.requests is not None
    assert shot.latency.inter_token.count == 5
    assert shot.latency.inter_token.p99 == pytest.approx(0.02, rel=0.006)
    assert shot.latency.e2e.p50 == pytest.approx(4, rel=0.006)
    assert shot.latency.steps_per_second == pytest.approx(5 / 10)  # the first event is ten seconds old
    assert (shot.kv.active, shot.kv.tail_ratio) == (4, 8 / 64)
    assert (shot.memory.weights_bytes, shot.memory.pool_bytes) == (5000, 64_000)
    assert shot.requests.live == [events.RequestView(request_id="a", state="waiting")]
    assert [record.request_id for record in shot.requests.finished] == [f"r{i}" for i in range(39, 7, -1)]


def test_an_ended_engine_says_why() -> None:
    fold = busy_fold()
    fold.take([events.EngineEnded(at_ns=99 * S, engine_id="e1", cause="killed", detail="signal 9")])
    state = build(fold, ["state"]).state
    assert state is not None
    assert (state.engine, state.engine_why, state.engine_pid, state.daemon) == ("killed", "signal 9", None, "ready")


def test_an_account_of_memory_names_the_largest_and_says_null_of_what_nobody_reports() -> None:
    live = [{"request_id": name, "state": "running", "blocks": held} for name, held in (("a", 2), ("b", 9), ("c", 0))]
    report = events.MemoryReport(
        at_ns=1,
        process="engine",
        device="cpu",
        booked={"weights": 50, "runtime": 70},
        measured={"allocator_reserved": 100, "allocator_free": 40, "allocator_largest_free": 10},
        limit_bytes=1000,
    )
    fold = Fold("m")
    fold.take([report])
    told = {"mappings": {"[heap]": 5, "/a.so": 9}, "segments": None}
    views = snapshot.Views(live_requests=live, block_map=b"\x00\x02", engine_memory=told)
    made = accounts.account(snapshot.build(fold, accounts.PARTS, views), views.engine_memory)
    assert made.owners is not None
    assert made.owners[:2] == [("headroom", 880), ("runtime", 70)]
    assert made.allocator is not None
    assert made.allocator.fragmentation_ratio == 0.3
    assert [holder.request_id for holder in made.holders or []] == ["b", "a"]
    assert list(made.mappings or {}) == ["/a.so", "[heap]"]
    assert msgspec.json.decode(accounts.encode(made))["kv"]["block_map"] == "AAI="
    alone = accounts.account(snapshot.build(fold, accounts.PARTS), None)
    assert (alone.holders, alone.mappings, alone.segments) == (None, None, None)
