"""From incidents to bundles, and from the rings of a dead life to the incident that nobody reported."""

from pathlib import Path

import msgspec
import pytest

from telemetry import events
from telemetry.bundle import Folder
from telemetry.bus import Bus
from telemetry.evidence import Clue, ProcessEnd
from telemetry.fold import Fold
from telemetry.postmortem import Casebook, Note, previous_life
from telemetry.recorder import Recorder

LIMITS = events.LimitsView(
    max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk=32, max_partial_prefills=2, context_limit=128,
    kv_blocks=64, spec_depth=0,
)  # fmt: skip
STARTED = events.EngineStarted(
    at_ns=10,
    engine_id="abc",
    pid=7,
    restarts=0,
    phases={},
    resolved={"memory_limit_bytes": 1 << 30, "weights_bytes": 1 << 20, "kv_blocks": 64, "kv_block_bytes": 4096},
    reasons={"kv_blocks": "fits"},
    limits=LIMITS,
)
STATUS = events.EngineStatus(
    at_ns=20,
    state="ready",
    progress_ns=20,
    steps=1,
    limits=LIMITS,
    sizes={},
    rss_bytes=1 << 28,
    kv_active=4,
    kv_free=60,
)


def step(number: int, **more: object) -> events.StepReport:
    return events.StepReport(at_ns=100 + number, step=number, **more)  # type: ignore[arg-type]


def incident(name: str = "oom-1", kind: str = "oom", at_ns: int = 5_000_000_000, **more: object) -> events.Incident:
    return events.Incident(
        at_ns=at_ns, incident_id=name, kind=kind, cause="logits", summary="s", engine_id="abc",
        request_ids=("r1",), clues=(Clue("logits", "for", "t"),), **more,  # type: ignore[arg-type]
    )  # fmt: skip


def ring(path: Path, label: str, told: list[events.Event], *, clean: bool = False, note: Note | None = None) -> None:
    recorder = Recorder.open(path, label, 1 << 16, note=note.encode() if note else b"")
    for event in told:
        recorder.append(events.encode(event))
    recorder.close(clean=clean)


@pytest.fixture
def fold() -> Fold:
    fold = Fold("tiny")
    fold.take([STARTED, STATUS])
    return fold


def test_an_incident_becomes_a_bundle_with_ladder_steps_limits_and_requests(tmp_path: Path, fold: Fold) -> None:
    ring(tmp_path / "engine.ring", "abc", [step(n) for n in range(100)])
    book = Casebook(Folder(tmp_path / "incidents"), fold, tmp_path / "engine.ring", {"inferd": "1"})
    view = events.RequestView(request_id="r2", state="running", prompt_tokens=5)
    book.take([STATUS, incident(requests=(view,))])
    bundle = book.folder.read("oom-1")
    assert bundle is not None
    assert (bundle.model, bundle.limits, bundle.cause) == ("tiny", LIMITS, "logits")
    assert [s.step for s in bundle.steps] == list(range(36, 100))
    assert [(r.request_id, r.part) for r in bundle.requests] == [("r1", "suspect"), ("r2", "running")]
    assert bundle.ladder_before is not None
    assert bundle.ladder_at is not None
    assert bundle.ladder_at.owners["weights"] == 1 << 20
    assert bundle.resolved["reasons"] == {"kv_blocks": "fits"}


def test_a_sign_of_life_after_a_fault_is_its_outcome(tmp_path: Path, fold: Fold) -> None:
    book = Casebook(Folder(tmp_path / "incidents"), fold, tmp_path / "engine.ring", {})
    alive = msgspec.structs.replace(STATUS, at_ns=8_000_000_000)
    book.take([incident(), incident("wedged-1", "wedged"), STATUS])
    assert book.folder.read("oom-1").outcome == ""  # that beat is older than the fault
    book.take([alive])
    assert "goes on; no request failed" in book.folder.read("oom-1").outcome
    assert "moved again" in book.folder.read("wedged-1").outcome
    assert book.sizes()["casebook_open"] == 0


def test_what_comes_of_it_is_added(tmp_path: Path, fold: Fold) -> None:
    book = Casebook(Folder(tmp_path / "incidents"), fold, tmp_path / "engine.ring", {})
    book.take([incident("wedged-1", "wedged")])
    end = events.EngineEnded(at_ns=9, engine_id="abc", cause="wedged", detail="stuck", victims=("r1", "r2"))
    book.take([end])
    bundle = book.folder.read("wedged-1")
    assert bundle is not None
    assert "2 running choices were cut off" in bundle.outcome
    assert ("r2", "victim") in [(r.request_id, r.part) for r in bundle.requests]
    assert book.sizes()["casebook_open"] == 0


def test_a_storm_of_the_same_is_written_once_a_second(tmp_path: Path, fold: Fold) -> None:
    book = Casebook(Folder(tmp_path / "incidents"), fold, tmp_path / "engine.ring", {})
    storm = [incident(f"oom-{n}", at_ns=5_000_000_000 + n * 10_000_000) for n in range(300)]
    storm = [msgspec.structs.replace(each, bundle=str(book.place(each))) for each in storm]
    book.take(storm)
    assert set(book.folder.ids()) == {"oom-0", "oom-100", "oom-200"}
    assert all(Path(each.bundle).is_file() for each in storm)  # each says where it is told of
    other = incident("wedged-1", "wedged", at_ns=storm[-1].at_ns)
    assert book.place(other) == book.folder.file("wedged-1")


def test_a_full_disk_is_a_counter_of_the_bus_and_no_incident(tmp_path: Path, fold: Fold) -> None:
    (tmp_path / "incidents").write_text("in the way")
    book = Casebook(Folder(tmp_path / "incidents"), fold, tmp_path / "engine.ring", {})
    seen: list[events.Event] = []
    bus = Bus(None, {"bundle": book.take, "fold": seen.extend}, batch_seconds=0.0)
    for number in range(3):
        bus.publish(incident(f"oom-{number}", at_ns=number * 10**10))
    bus.close()
    assert bus.dropped() == {"bundle": 3, "fold": 0}
    assert [type(event) for event in seen] == [events.Incident] * 3


def lived(tmp_path: Path, *, clean: bool = False, engine_clean: bool = False, note: Note | None = None) -> None:
    told = [STARTED, STATUS, events.StateChanged(at_ns=25, state="ready", why="")]
    ring(tmp_path / "daemon.ring", "daemon", told, clean=clean, note=note)
    heard = [step(1, admitted=((0, "a"), (1, "b"))), step(2, finished=("a",))]
    ring(tmp_path / "engine.ring", "abc", heard, clean=engine_clean)


def test_both_killed_at_once_is_found_by_the_next_life(tmp_path: Path) -> None:
    lived(tmp_path, note=Note(oom_kills=3, boot_id="b"))
    life = previous_life(tmp_path / "daemon.ring", tmp_path / "engine.ring", Note(oom_kills=3, boot_id="b"))
    assert life is not None
    assert (life.incident.kind, life.incident.cause) == ("killed", "killed")
    assert life.incident.end == ProcessEnd(process="both", oom_kills=0)
    assert life.incident.request_ids == ("b",)
    assert life.bundle.previous_life
    assert [s.step for s in life.bundle.steps] == [1, 2]
    assert life.bundle.ladder_at is not None


def test_a_moved_counter_makes_it_a_kill_for_memory(tmp_path: Path) -> None:
    """fixture: no control group of this machine kills us; the counters are those that one would have."""
    lived(tmp_path, note=Note(oom_kills=3, boot_id="b"))
    life = previous_life(tmp_path / "daemon.ring", tmp_path / "engine.ring", Note(oom_kills=5, boot_id="b"))
    assert life is not None
    assert (life.incident.kind, life.incident.cause) == ("oom_killed", "host_cgroup")
    assert any(knob.name == "memory.max" for knob in life.incident.knobs)


def test_another_boot_says_so(tmp_path: Path) -> None:
    lived(tmp_path, note=Note(oom_kills=3, boot_id="b"))
    life = previous_life(tmp_path / "daemon.ring", tmp_path / "engine.ring", Note(oom_kills=0, boot_id="c"))
    assert life is not None
    assert life.incident.kind == "killed"
    assert "started again" in life.bundle.notes[0]


def test_an_orderly_end_or_no_life_at_all_is_no_case(tmp_path: Path) -> None:
    assert previous_life(tmp_path / "daemon.ring", tmp_path / "engine.ring", Note()) is None
    lived(tmp_path, clean=True, engine_clean=True)
    assert previous_life(tmp_path / "daemon.ring", tmp_path / "engine.ring", Note()) is None
    (tmp_path / "daemon.ring").write_bytes(b"garbage")
    assert previous_life(tmp_path / "daemon.ring", tmp_path / "engine.ring", Note()) is None


def test_the_engines_ring_of_another_life_is_not_used(tmp_path: Path) -> None:
    lived(tmp_path)
    ring(tmp_path / "engine.ring", "other", [step(9, admitted=((0, "z"),))])
    life = previous_life(tmp_path / "daemon.ring", tmp_path / "engine.ring", Note())
    assert life is not None
    assert life.incident.request_ids == ()
    assert life.incident.end is not None
    assert life.incident.end.process == "daemon"


def test_a_life_so_long_that_its_ring_forgot_the_engines_start_had_an_engine(tmp_path: Path) -> None:
    ring(tmp_path / "daemon.ring", "daemon", [STATUS])
    ring(tmp_path / "engine.ring", "abc", [step(1, admitted=((0, "r1"),))])
    life = previous_life(tmp_path / "daemon.ring", tmp_path / "engine.ring", Note())
    assert life is not None
    assert life.bundle.end is not None
    assert life.bundle.end.process == "both"
    assert life.bundle.limits == LIMITS
    assert life.incident.request_ids == ("r1",)


def test_an_engines_ring_from_before_that_daemon_is_not_its(tmp_path: Path) -> None:
    ring(tmp_path / "engine.ring", "old", [step(1)])
    ring(tmp_path / "daemon.ring", "daemon", [STATUS])
    life = previous_life(tmp_path / "daemon.ring", tmp_path / "engine.ring", Note())
    assert life is not None
    assert life.bundle.end is not None
    assert life.bundle.end.process == "daemon"
