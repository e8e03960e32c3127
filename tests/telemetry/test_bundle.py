"""Bundles on disk: whole, capped, rotated, readable again, and for people."""

from pathlib import Path

import msgspec
import pytest

from telemetry.bundle import Folder
from telemetry.casefile import Bundle, Involved, Rungs
from telemetry.casetext import to_markdown
from telemetry.events import INCIDENT_CAUSES, LimitsView, StepReport
from telemetry.evidence import OOM_CAUSES, Clue, Knob


def bundle(name: str = "oom-1", **more: object) -> Bundle:
    base = Bundle(
        incident_id=name,
        kind="oom",
        cause="logits",
        summary="step 7 could not get 8.0 MiB in logits",
        at_ns=5,
        unix_seconds=1.5,
        clues=(Clue("logits", "for", "it failed in logits"), Clue("leak", "against", "nothing grew")),
        knobs=(Knob("--max-num-seqs", "lower it"),),
        requests=(Involved(request_id="r1", part="suspect", prompt_tokens=9),),
        ladder_at=Rungs(at_ns=5, device="cpu", source="ledger", owners={"weights": 1 << 20}, limit_bytes=2 << 20),
    )
    return msgspec.structs.replace(base, **more)


def test_a_bundle_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "incidents")
    path = folder.write(bundle())
    assert path == folder.file("oom-1")
    assert folder.read("oom-1") == bundle()
    text = path.with_suffix(".md").read_text()
    for wanted in ("# Memory ran out: the logits", "- It failed in logits.", "`--max-num-seqs`: lower it", "r1"):
        assert wanted in text
    assert sorted(file.name for file in folder.path.iterdir()) == ["oom-1.json", "oom-1.md"]  # nothing half-written


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path, kept=3)
    for number in range(6):
        folder.write(bundle(f"oom-{number}"))
    assert sorted(folder.ids()) == ["oom-3", "oom-4", "oom-5"]
    assert len(list(tmp_path.iterdir())) == 6


def test_a_bundle_keeps_to_its_size_and_says_what_it_left_out(tmp_path: Path) -> None:
    steps = tuple(StepReport(at_ns=n, step=n, rows=bytes(6000)) for n in range(200))
    folder = Folder(tmp_path, most_bytes=64 << 10)
    path = folder.write(bundle(steps=steps, stacks={"engine": "x" * 100_000}, resolved={"why": "y" * 100_000}))
    assert path.stat().st_size <= 64 << 10
    kept = folder.read("oom-1")
    assert kept is not None
    assert any("left out" in note for note in kept.notes)
    assert kept.cause == "logits"


def test_an_id_cannot_leave_the_folder(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert folder.read("../../etc/passwd") is None
    with pytest.raises(ValueError, match="no incident"):
        folder.file("a/b")


def test_a_full_disk_leaves_nothing_behind_and_is_the_callers_to_count(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "file")
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(OSError, match="exists"):
        folder.write(bundle())


def test_markdown_of_an_empty_bundle_has_no_empty_tables() -> None:
    text = to_markdown(Bundle(incident_id="x-1", kind="killed", cause="killed", summary="s", at_ns=1, unix_seconds=1.0))
    assert "## Requests" not in text
    assert "## Who had" not in text
    assert "{" not in text


def test_markdown_says_in_words_what_it_was_what_it_was_not_and_what_to_turn() -> None:
    limits = LimitsView(
        max_num_seqs=16, max_num_batched_tokens=512, prefill_chunk=512, max_partial_prefills=4, context_limit=512,
        kv_blocks=64, spec_depth=0,
    )  # fmt: skip
    text = to_markdown(bundle(limits=limits, model="tiny", notes=("nobody counts kills here",)))
    assert text.startswith(
        "# Memory ran out: the logits of one step were too large\n\n1970-01-01 00:00:01 UTC, model tiny."
    )
    assert "## Why this is the cause\n\n- It failed in logits." in text
    assert "## What it was not\n\n- A leak: nothing grew." in text
    assert "- Nobody counts kills here." in text
    assert (
        "`--max-num-seqs`: lower it. It is 16 now; to halve it at once: `inferd doctor do set max_num_seqs=8`" in text
    )
    assert "inferd doctor runbook oom" in text


@pytest.mark.parametrize("cause", {*OOM_CAUSES, *INCIDENT_CAUSES} - {"oom", "oom_killed"})
def test_every_cause_has_a_title_and_every_kind_a_runbook(cause: str) -> None:
    kind = cause if cause in INCIDENT_CAUSES else "oom"
    text = to_markdown(bundle(kind=kind, cause=cause))
    assert not text.startswith(f"# {kind}: ")
    assert "inferd doctor runbook " in text
