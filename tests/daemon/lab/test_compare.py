"""Compare: what changed is named, differences are told from noise, one run is not pretended to be more."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from daemon.commands.bench import command
from daemon.lab import shelf
from daemon.lab.compare import compared, render
from daemon.lab.record import Report, changed
from tests.daemon.lab import made


def repeated(ttft_s: float, **changes: object) -> Report:
    return made.report(*(made.run(repeat=n, ttft_s=ttft_s) for n in range(4)), **changes)


def verdicts(old: Report, new: Report) -> dict[str, str]:
    return {row["figure"]: row["verdict"] for row in compared(old, new)["figures"]}


def test_better_worse_and_noise() -> None:
    found = verdicts(repeated(0.2), repeated(0.1))
    assert found["ttft_p95_s"] == "better"
    assert found["inter_token_p95_s"] == "the same"
    assert verdicts(repeated(0.1), repeated(0.2))["ttft_p95_s"] == "worse"
    assert verdicts(repeated(0.1), repeated(0.1002))["ttft_p95_s"] == "noise"


def test_what_was_set_differently_is_named() -> None:
    old = repeated(0.1)
    new = changed(old, settings={"memory_limit": 1}, versions={"inferd": "0.2.0"}, machine={"cpu": "other"}, seeds=(9,))
    found = compared(old, new)
    assert {row["what"] for row in found["changed"]} == {
        *("seeds", "setting memory_limit", "version inferd", "machine cpu", "machine cores")
    }
    assert any("different machines" in note for note in found["notes"])
    assert any("seeds differ" in note for note in found["notes"])


def test_one_run_each_is_said_to_be_one() -> None:
    found = compared(made.report(made.run(ttft_s=0.1)), made.report(made.run(ttft_s=0.2)))
    row = next(row for row in found["figures"] if row["figure"] == "ttft_p95_s")
    assert row["verdict"] == "one run: cannot say"
    assert any("nobody can tell" in note for note in found["notes"])


def test_sides_that_only_one_has_are_said() -> None:
    found = compared(made.ablated(), made.report(made.run("all on")))
    assert any("only in one of them: paged KV off, prefix cache off" in note for note in found["notes"])


def test_the_command_reads_two_files(tmp_path: Path) -> None:
    for name, ttft_s in (("a", 0.1), ("b", 0.3)):
        shelf.keep(str(tmp_path / f"{name}.html"), repeated(ttft_s))
    words = ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    text = CliRunner().invoke(command, words)
    assert text.exit_code == 0
    assert "worse" in text.output
    assert json.loads(CliRunner().invoke(command, [*words, "--json"]).output)["figures"]


@pytest.mark.parametrize("missing", ["a.json", "b.json"])
def test_a_missing_file_is_one_line(tmp_path: Path, missing: str) -> None:
    done = CliRunner().invoke(command, ["compare", str(tmp_path / missing), str(tmp_path / missing)])
    assert f"cannot read {tmp_path / missing}" in str(done.exception)


def test_text_says_that_nothing_changed() -> None:
    same = repeated(0.1)
    assert render(compared(same, same)).startswith("Nothing was set differently.")
