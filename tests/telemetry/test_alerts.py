"""The alert rules: valid, about metrics that exist, each with words, a runbook, and a case for and against it."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from telemetry.exposition import rows
from tests.fakes import promql

FOLDER = Path(__file__).resolve().parents[2] / "telemetry" / "prometheus"
RULE_FILES = sorted((FOLDER / "rules").glob("*.yml"))
CASE_FILES = sorted((FOLDER / "rule_tests").glob("*.yml"))
KNOWN = promql.series(rows())
RUNBOOKS = {
    *("oom", "kv_pressure", "ttft_spike", "slow_decode", "low_throughput", "short_answers", "prefix_cache"),
    *(
        "memory_creep",
        "wedged_engine",
        "slow_start",
        "crash_loop",
        "overload",
        "disk_full",
        "telemetry_lost",
        "missed_targets",
    ),
}
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for file in RULE_FILES
    for group in yaml.safe_load(file.read_text())["groups"]
    for rule in group["rules"]
}
CASES: list[dict[str, Any]] = [case for file in CASE_FILES for case in yaml.safe_load(file.read_text())["tests"]]


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    return found


def firing(case: dict[str, Any]) -> set[str]:
    """The alerts that a case of promtool's expects to fire, and no others."""
    return {
        name
        for test in case.get("promql_expr_test", ())
        for sample in test["exp_samples"]
        for name in re.findall(r'alertname="(\w+)"', sample["labels"])
    }


def test_promtool_accepts_rules_and_example(promtool: str) -> None:
    """The example's config check covers every rule file that it names, and it names them all."""
    done = subprocess.run(
        [promtool, "check", "config", FOLDER / "prometheus.yml"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checked = sum(int(n) for n in re.findall(r"(\d+) rules found", done.stdout))
    assert checked == len(ALERTS) > 0


def test_alerts_fire_when_they_should_and_not_when_they_should_not(promtool: str) -> None:
    done = subprocess.run([promtool, "test", "rules", *CASE_FILES], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == len(CASE_FILES)


def test_a_case_that_expects_too_much_fails(promtool: str, tmp_path: Path) -> None:
    """The cases are compared, not only run: without its threshold crossed, an expected alert is a failure."""
    case = (FOLDER / "rule_tests" / "telemetry.yml").read_text()
    for old, new in (("../rules", str(FOLDER / "rules")), ("1x4 0+30x20", "1x24")):
        assert old in case
        case = case.replace(old, new)
    file = tmp_path / "case.yml"
    file.write_text(case)
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "InferdSnapshotStale" in done.stdout + done.stderr


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_has_a_case_for_and_a_case_against(name: str) -> None:
    """Against: a case with every metric that the rule reads, in which it must stay silent."""
    metrics = promql.read(ALERTS[name]["expr"]).names
    given = [({promql.read(s["series"]).selectors[0].name for s in case["input_series"]}, case) for case in CASES]
    assert any(name in firing(case) for _, case in given), "no case in which it fires"
    assert any(
        metrics & series and name not in firing(case) and "promql_expr_test" in case
        for series, case in given
        if metrics <= series or " or\n" in ALERTS[name]["expr"] or "\nor\n" in ALERTS[name]["expr"]
    ), "no case in which it stays silent"


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_reads_what_is_exposed(name: str) -> None:
    assert promql.faults(ALERTS[name]["expr"], KNOWN) == []
    for inner in re.findall(r'printf "(\w+\(.*?\))', str(ALERTS[name]["annotations"])):
        assert promql.faults(inner.replace("%q", '"x"'), KNOWN) == []


def test_cases_feed_only_what_is_exposed() -> None:
    """A case over a misspelt series would prove nothing."""
    for case in CASES:
        for given in case["input_series"]:
            assert promql.faults(given["series"], KNOWN) == [], case["name"]


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_helps_a_tired_person(name: str) -> None:
    """A short summary that says where, more words, how bad it is, and one command from here to the runbook."""
    notes, runbook = ALERTS[name]["annotations"], ALERTS[name]["annotations"]["runbook"]
    assert name.startswith("Inferd")
    assert ALERTS[name]["labels"]["severity"] in ("critical", "warning", "info")
    assert "{{ $labels.instance }}" in notes["summary"]
    assert len(notes["summary"]) <= 110
    assert "inferd_" not in notes["summary"], "words, not metrics"
    assert notes["description"] != notes["summary"]
    assert runbook in RUNBOOKS
    assert notes["command"] == f"inferd doctor runbook {runbook}"
    assert notes["runbook_url"].endswith(f"/{runbook}.md")
    assert "$externalLabels.inferd_runbook_base" in notes["runbook_url"]


def test_every_runbook_is_reached_by_an_alert() -> None:
    assert {rule["annotations"]["runbook"] for rule in ALERTS.values()} == RUNBOOKS
