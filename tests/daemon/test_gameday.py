"""`inferd doctor gameday`: three drills for real, on scratch daemons; and how verdicts are told."""

import json
from dataclasses import replace

import pytest

from daemon import cli
from daemon.drills import DRILLS
from daemon.gameday import command
from daemon.gameday.play import Verdict
from daemon.gameday.proof import REMEDIES
from daemon.remedies import ACTIONS
from runbooks import check

GOOD = Verdict(
    drill="leak", metric="inferd_oom_total", moved=True, alert="InferdRepeatedOom", fired=True,
    finding="memory_creep x", made=True, first="memory_creep x", remedy="do restart-engine", works=True, seconds=9.0,
)  # fmt: skip


@pytest.mark.timeout(600)
def test_three_drills_move_alert_find_and_heal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_MODEL", "/nowhere")  # nothing of the machine's own daemon reaches the scratch one
    drills = ("kill_engine", "capacity", "leak")
    code = cli.run(["doctor", "gameday", "--json", *(word for name in drills for word in ("--only", name))])
    shown = capsys.readouterr()
    verdicts = json.loads(shown.out)
    assert code == 0, verdicts
    assert [each["drill"] for each in verdicts] == list(drills)
    for each in verdicts:
        drill = DRILLS[each["drill"]]
        assert each["first"] == f"{drill.runbook} {drill.section}"
        assert each["good"] and each["moved"] and each["fired"] and each["works"]
    assert "1/3 kill_engine" in shown.err


def test_what_is_missing_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1 of 1 good" in command.text([GOOD])
    for missing, said in (
        ({"moved": False}, "inferd_oom_total did not move"),
        ({"fired": False}, "InferdRepeatedOom does not fire"),
        ({"made": False, "first": "oom y"}, "the first finding should be memory_creep x"),
        ({"works": False, "doubt": "after the remedy nobody was answered"}, "nobody was answered"),
        ({"error": "it did not start"}, "it did not start"),
    ):
        bad = replace(GOOD, **missing)  # type: ignore[arg-type]
        assert said in command.text([GOOD, bad])
        assert "1 of 2 good" in command.text([GOOD, bad])
        monkeypatch.setattr(command, "play", lambda *_, bad=bad: [bad])
        assert cli.run(["doctor", "gameday", "--only", "leak"]) == 1
    assert "leak" in capsys.readouterr().out
    assert cli.run(["doctor", "gameday", "--only", "nothing"]) == 2
    assert "no such drill: nothing" in capsys.readouterr().err
    assert cli.run(["doctor", "gameday", "nothing"]) == 2  # at once, and not fifteen times
    assert "there is no model 'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("name", DRILLS)
def test_a_drill_has_a_remedy_that_its_runbook_names(name: str) -> None:
    words = REMEDIES[name].words.split()
    if words[0] != "do":
        assert REMEDIES[name].words.startswith("(")  # done to the world around, not by a command
        return
    assert words[1] in ACTIONS
    texts = {book.name: book.text for book in check.shelf()}
    assert f"inferd doctor {words[0]} {words[1]}" in texts[DRILLS[name].runbook]
