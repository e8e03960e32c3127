"""The fold of frames into what is shown, and recordings: journal, ring, bundle, state directory, recorded feed."""

import threading
from pathlib import Path

import msgspec
import pytest

from telemetry import events
from telemetry.bundle import Folder
from telemetry.casefile import Bundle
from telemetry.events import LimitsView, RequestRecord, StepReport
from telemetry.journal import Journal
from telemetry.parts import KvView, LatencyView, Percentiles, QueueView, RequestsView
from telemetry.recorder import Recorder
from telemetry.snapshot import Snapshot
from tests.tui.driving import HERE, SECOND, recorded
from tui.replay import Player, Replay, Unreadable, last, load
from tui.view import POINTS, Frame, View

LIMITS = LimitsView(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    prefill_chunk=16,
    max_partial_prefills=1,
    context_limit=128,
    kv_blocks=50,
    spec_depth=0,
)


def snapshot(at_ns: int = 0, **parts: object) -> Snapshot:
    return Snapshot(at_ns=at_ns, unix_seconds=100.0 + at_ns / 1e9, model="m", **parts)  # type: ignore[arg-type]


def latency(p95: float | None) -> LatencyView:
    some = Percentiles(count=1, p95=p95)
    return LatencyView(
        window_seconds=60,
        ttft=some,
        inter_token=some,
        e2e=some,
        output_tokens_per_second=1.0,
        prefill_tokens_per_second=0.0,
        requests_per_second=0.0,
        steps_per_second=0.0,
    )


def queue(running: int) -> QueueView:
    return QueueView(running=running, waiting=0, preempted=0, waiting_capacity=0, waiting_kv=0, waiting_budget=0)


def test_parts_that_were_not_asked_for_stay_and_those_that_were_go() -> None:
    view = View()
    view.take(Frame(at_ns=1, snapshot=snapshot(queue=queue(3), limits=LIMITS, kv=KvView(active=1, block_map=b"\2"))))
    view.take(Frame(at_ns=2, snapshot=snapshot(1, kv=KvView(active=2)), asked=("queue", "kv")))
    assert view.snapshot is not None and view.snapshot.kv is not None
    assert view.snapshot.queue is None, "asked for, and not reported any more"
    assert view.snapshot.limits == LIMITS
    assert (view.snapshot.kv.active, view.snapshot.kv.block_map) == (2, b"\2"), "figures leave the map alone"
    view.take(Frame(at_ns=3, snapshot=snapshot(2, kv=KvView(active=2)), asked=("kv",)))
    assert view.snapshot.kv.block_map is None, "the map was asked for, and the engine did not answer"


def test_a_live_line_has_a_point_a_frame_and_gaps_where_nothing_was_reported() -> None:
    view = View()
    for p95 in (0.5, None, 0.25):
        view.take(Frame(at_ns=1, snapshot=snapshot(latency=latency(p95)), asked=("latency",)))
    view.take(Frame(at_ns=1, snapshot=snapshot(requests=RequestsView()), asked=("requests",)))
    assert view.values("ttft.p95") == [0.5, None, 0.25]
    for _ in range(2 * POINTS):
        view.take(Frame(at_ns=1, snapshot=snapshot(latency=latency(1.0)), asked=("latency",)))
    assert len(view.values("ttft.p95")) == POINTS


def test_an_error_ages_what_is_shown_and_changes_nothing_else() -> None:
    view = View()
    view.take(Frame(at_ns=SECOND, snapshot=snapshot(queue=queue(3))))
    view.take(Frame(at_ns=9 * SECOND, error="refused"))
    assert (view.age_s, view.error) == (8.0, "refused")
    assert view.snapshot is not None and view.snapshot.queue == queue(3)
    view.take(Frame(at_ns=10 * SECOND, snapshot=snapshot(queue=queue(1))))
    assert (view.age_s, view.error) == (0.0, "")


def test_the_kv_share_is_of_what_the_limit_lets_be_used() -> None:
    view = View()
    view.take(Frame(at_ns=1, snapshot=snapshot(kv=KvView(active=40, cached=0, free=160), limits=LIMITS)))
    assert view.values("kv") == [0.8]


def test_a_reconnection_repeats_no_step_and_no_note() -> None:
    step = StepReport(at_ns=5, step=1)
    found = events.Incident(at_ns=6, incident_id="i", kind="crash", cause="crash", summary="s")
    whole = snapshot(steps=[step], incidents=[found], limits=LIMITS)
    view = View()
    for _ in range(3):
        view.take(Frame(at_ns=1, snapshot=whole))
    assert (list(view.steps), list(view.notes), len(view.limits)) == ([step], [found], 1)


def test_everything_is_bounded() -> None:
    view = View()
    record = recorded_record()
    for n in range(3000):
        more = (
            StepReport(at_ns=n, step=n),
            msgspec.structs.replace(record, request_id=str(n)),
            events.StateChanged(at_ns=n, state="ready", why=""),
        )
        view.take(Frame(at_ns=n, events=more))
    assert len(view.steps) <= 512 and len(view.records) <= 512 and len(view.notes) <= 256


def recorded_record() -> RequestRecord:
    frames = recorded("healthy")
    return next(e for frame in frames for e in frame.events if isinstance(e, RequestRecord))


def journal_of(directory: Path) -> Path:
    path = directory / "journal.jsonl"
    journal = Journal(path, clock=lambda: 10 * SECOND, wall=lambda: 1000.0)
    record = msgspec.structs.replace(recorded_record(), at_ns=9 * SECOND, arrival_ns=8 * SECOND)
    journal.take([events.StateChanged(at_ns=7 * SECOND, state="ready", why="")])
    journal.take([record, events.LimitsChanged(at_ns=9 * SECOND, limits=LIMITS, source="api", why="asked")])
    return path


def test_a_journal_is_replayed_through_the_daemons_own_fold(tmp_path: Path) -> None:
    path = journal_of(tmp_path)
    moments = load(path)
    assert [moment.unix_seconds for moment in moments] == [997.0, 999.0, 999.0]
    player = Player(moments)
    (start,) = player.frames(997.0, 0)
    assert start.snapshot is not None and start.snapshot.totals is not None and start.snapshot.state is not None
    assert (start.snapshot.state.daemon, sum(start.snapshot.totals.finished.values())) == ("ready", 0)
    (end,) = player.frames(999.0, 1)
    assert end.snapshot is not None and end.snapshot.totals is not None
    assert sum(end.snapshot.totals.finished.values()) == 1
    assert end.snapshot.limits == LIMITS
    (back,) = player.frames(998.0, 2)
    assert back.snapshot is not None and back.snapshot.totals is not None
    assert sum(back.snapshot.totals.finished.values()) == 0, "sought backwards"


def test_a_state_directory_gives_journal_and_rings_once(tmp_path: Path) -> None:
    journal_of(tmp_path)
    with Recorder.open(tmp_path / "engine.ring", "engine") as ring:
        ring.append(events.encode(StepReport(at_ns=123, step=7)))
    kinds = sorted(type(moment.event).__name__ for moment in load(tmp_path))
    assert kinds == ["LimitsChanged", "RequestRecord", "StateChanged", "StepReport"]


def test_a_bundle_is_replayed(tmp_path: Path) -> None:
    bundle = Bundle(
        incident_id="crash-1",
        kind="crash",
        cause="crash",
        summary="it fell",
        at_ns=5 * SECOND,
        unix_seconds=50.0,
        steps=(StepReport(at_ns=4 * SECOND, step=1),),
    )
    path = Folder(tmp_path).write(bundle)
    assert [moment.unix_seconds for moment in load(path)] == [49.0, 50.0]
    shot = last(path)
    assert shot.incidents is not None and shot.incidents[0].summary == "it fell"
    assert shot.steps is not None and shot.steps[0].step == 1


@pytest.mark.parametrize("name", ["empty.jsonl", "none.json", "short.ring"])
def test_what_is_no_recording_is_said_to_be_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}\n")
    with pytest.raises(Unreadable, match=name):
        load(tmp_path / name)


def test_a_replay_seeks_pauses_and_says_where_it_is(tmp_path: Path) -> None:
    frames: list[Frame] = []
    arrived = threading.Condition()

    def deliver(frame: Frame) -> None:
        with arrived:
            frames.append(frame)
            arrived.notify_all()

    replay = Replay(HERE / "healthy.jsonl", now=lambda: 0.0)  # its own time stands still
    replay.start(deliver)
    with arrived:
        assert arrived.wait_for(lambda: frames, 60)
    first = frames[0]
    assert "replay" in first.label
    replay.seek(5)
    with arrived:
        assert arrived.wait_for(lambda: frames[-1].label != first.label, 60)
    replay.seek(-500)
    with arrived:
        assert arrived.wait_for(lambda: frames[-1].label == first.label, 60)
    replay.stop()


def test_a_recorded_feed_keeps_what_changes_seldom() -> None:
    shot = recorded("healthy")[-1].snapshot
    assert shot is not None and shot.ceilings and shot.requests and shot.requests.live
