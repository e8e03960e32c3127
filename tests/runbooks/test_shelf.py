"""The shelf: every check has its text and every text its check; alerts and runbooks name each other."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from runbooks import check, report
from runbooks.check import ranked, slug
from runbooks.evidence import Evidence
from telemetry.events import Finding
from telemetry.snapshot import Snapshot

REPO = Path(__file__).resolve().parents[2]
HOME = REPO / "runbooks"
# What is no check: the shelf's own machinery.
MACHINERY = {"__init__", "bundle", "check", "evidence", "gather", "machine", "report"}
PARTS = ("Symptom", "In top", "What it means", "Confirm", "How to know that it worked", "When to escalate")
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule["annotations"]
    for file in sorted((REPO / "telemetry" / "prometheus" / "rules").glob("*.yml"))
    for group in yaml.safe_load(file.read_text())["groups"]
    for rule in group["rules"]
}
BOOKS = {book.name: book for book in check.shelf()}


def test_every_check_has_a_text_and_every_text_a_check() -> None:
    modules = {path.stem for path in HOME.glob("*.py")} - MACHINERY
    assert modules == set(BOOKS)
    assert len(modules - {"installation"}) >= 14


@pytest.mark.parametrize("name", BOOKS)
def test_a_runbook_has_all_its_parts(name: str) -> None:
    text = BOOKS[name].text
    assert text.startswith("# ")
    assert [part for part in PARTS if f"\n## {part}\n" not in text] == []
    assert len(text.splitlines()) <= 120, "who is paged at 3 a.m. reads no book"


@pytest.mark.parametrize("name", BOOKS)
def test_every_section_that_a_check_names_is_in_its_text(name: str) -> None:
    """Also those in commands: `inferd doctor runbook NAME SECTION`, wherever they stand."""
    source = (HOME / f"{name}.py").read_text(encoding="utf-8")
    slugs = BOOKS[name].sections
    literal = set(re.findall(r'section ?= ?"([a-z0-9-]+)"', source)) | set(
        re.findall(r'(?:return|else|:) "([a-z]+(?:-[a-z0-9]+)+)"', source)
    )
    assert literal <= set(slugs), literal - set(slugs)
    for book, section in re.findall(r"inferd doctor runbook (\w+)(?: ([a-z-]+))?$", BOOKS[name].text, re.MULTILINE):
        assert book in BOOKS
        assert not section or section in BOOKS[book].sections


@pytest.mark.parametrize("name", BOOKS)
def test_alerts_and_runbooks_name_each_other(name: str) -> None:
    said = re.search(r"^Alerts: (.+)$", BOOKS[name].text, re.MULTILINE)
    assert said
    named = set() if said[1] == "none" else set(said[1].split(", "))
    assert named == {alert for alert, notes in ALERTS.items() if notes["runbook"] == name}
    assert named or name in ("installation", "missed_targets"), "a runbook with a metric symptom has an alert"


def test_every_alert_leads_to_a_runbook_that_exists() -> None:
    for alert, notes in ALERTS.items():
        assert (HOME / notes["runbook_url"].rpartition("/")[2]).is_file(), alert
        assert notes["command"] == f"inferd doctor runbook {notes['runbook']}"


def test_a_section_is_printed_up_to_the_next_heading() -> None:
    book = check.Runbook("x", lambda _: None, "# T\n\n## A b's?\none\n### c\ntwo\n## D\nthree\n")
    assert slug("## A b's?") == "a-b-s"
    assert book.section("a-b-s") == "## A b's?\none\n### c\ntwo\n"
    assert book.section("d") == "## D\nthree\n"
    assert book.section("nowhere") is None


def finding(runbook: str, severity: str, confidence: float = 0.9, explains: tuple[str, ...] = ()) -> Finding:
    return Finding(
        at_ns=1,
        runbook=runbook,
        severity=severity,
        summary="",
        evidence={},
        next_step="",
        confidence=confidence,
        explains=explains,
    )


def test_a_cause_is_told_before_what_follows_from_it_and_inherits_its_harm() -> None:
    found = [
        finding("ttft_spike", "critical"),
        finding("disk_full", "warning"),
        finding("kv_pressure", "info", explains=("ttft_spike", "absent")),
        finding("overload", "info"),
    ]
    assert [each.runbook for each in ranked(found)] == ["kv_pressure", "ttft_spike", "disk_full", "overload"]
    loop = [finding("a", "info", explains=("b",)), finding("b", "warning", explains=("a",))]
    assert {each.runbook for each in ranked(loop)} == {"a", "b"}


def nothing() -> Evidence:
    return Evidence(source="live", at_ns=1, unix_seconds=1.0, snapshot=Snapshot(at_ns=1, unix_seconds=1.0, model="m"))


def test_a_check_that_breaks_says_so_and_hides_no_other() -> None:
    def broken(_: Evidence) -> Finding:
        raise ZeroDivisionError("oops")

    books = [check.Runbook("broken", broken, ""), check.Runbook("fine", lambda _: finding("fine", "warning"), "")]
    found = check.examine(nothing(), books)
    assert [each.runbook for each in found] == ["fine", "broken"]
    assert "ZeroDivisionError: oops" in found[1].summary


@pytest.mark.parametrize("name", BOOKS)
def test_no_evidence_is_no_finding(name: str) -> None:
    assert BOOKS[name].check(nothing()) is None


def test_the_remedy_is_printed_where_it_is_one_command() -> None:
    seen = Evidence(source="live", at_ns=1, unix_seconds=1.0, snapshot=Snapshot(at_ns=1, unix_seconds=1.0, model="m"))

    def told(runbook: str, section: str) -> str:
        made = check.finding(
            seen, runbook, "warning", "x", next_step=f"inferd doctor runbook {runbook}", section=section
        )
        return report.text(seen, [made])

    for runbook, section, remedy in (
        ("memory_creep", "buy-time", "restart-engine"),
        ("wedged_engine", "restart", "restart-engine"),
        ("ttft_spike", "others-prefill", "set context_limit=1024"),
    ):
        assert f"    remedy: inferd doctor do {remedy}\n" in told(runbook, section)
    for runbook, section in (("kv_pressure", "clients-that-do-not-read"), ("oom", "neighbours"), ("oom", "")):
        assert "remedy:" not in told(runbook, section), "it needs a name filled in, or is done elsewhere"
