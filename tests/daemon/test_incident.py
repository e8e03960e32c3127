"""The incident that README tells, played again: its commands run and say what docs/incident.md says."""

from pathlib import Path

import pytest

from tests import incident
from tests.tui.driving import text_of


@pytest.mark.timeout(600)
def test_the_incident_is_as_it_is_told(tmp_path: Path) -> None:
    told = incident.PAGE.read_text(encoding="utf-8")
    story = incident.play(tmp_path)
    assert incident.key_lines(incident.page(story)) == incident.key_lines(told)
    assert story.ooms == 1, "the same cap, planted after the remedy, refuses nothing"
    assert " oom: " not in story.proof
    assert story.proof_code == 10, "its price: requests wait"
    for name, shot in (("incident-top.svg", story.before), ("incident-after.svg", story.after)):
        drawn = text_of((incident.DOCS / name).read_text(encoding="utf-8"))
        assert drawn.splitlines()[1].split()[:4] == text_of(shot).splitlines()[1].split()[:4]
    assert "oom" in text_of(story.before)


def test_another_finding_is_another_story() -> None:
    told = incident.PAGE.read_text(encoding="utf-8")
    assert len(incident.key_lines(told)) >= 8
    assert incident.key_lines(told.replace("too-small", "a-leak")) != incident.key_lines(told)
