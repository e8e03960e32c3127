"""The ledger says what the results say, and the scripts can be run by the harness."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.perf import render, soak_abort
from tests.perf.harness import Findings, machine, scripts


def test_the_ledger_is_rendered_from_the_results() -> None:
    assert render.LEDGER.read_text() == render.render(render.results()), "run: python -m tests.perf.render"


def test_each_result_belongs_to_a_script_and_is_complete() -> None:
    for result in render.results():
        assert result["name"] in scripts()
        assert {"commit", "command", "date", "machine", "seeds", "runs", "summary", "promise", "met"} <= set(result)
        assert result["runs"] or result["name"] == "healthy", result["name"]  # of that, a row is a finding


@pytest.mark.parametrize("name", scripts())
def test_each_script_keeps_the_protocol(name: str) -> None:
    script = importlib.import_module(f"tests.perf.{name}")
    assert script.TITLE
    assert script.PROMISE
    assert script.run.__annotations__ == {"quick": bool, "return": Findings}


def test_an_unknown_name_is_one_line_and_exit_code_2(repo: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.perf.harness", "none"], cwd=repo, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "help_time" in done.stderr


def test_the_machine_is_described_without_its_name() -> None:
    facts = machine()
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 1 << 28
    assert json.loads(json.dumps(facts)) == facts
    assert not {"host", "hostname", "node"} & set(facts)


def test_a_rendered_result_shows_every_figure() -> None:
    result = {
        "name": "x", "title": "X", "promise": "p", "met": False, "commit": "c+", "date": "d", "command": "make",
        "runs": [{}], "seeds": [3], "took_s": 1.0, "load_before": 0.1, "machine": machine(),
        "summary": {"a_s": 1.5, "b": "2 / 3"}, "notes": ["n"],
    }  # fmt: skip
    text = render.render([result])
    for expected in ("| a_s | 1.5 |", "| b | 2 / 3 |", "**no**", "- n", "c+"):
        assert expected in text


def test_the_soaks_slope_and_gauge_are_right() -> None:
    assert soak_abort.slope([(0, 5.0), (1, 7.0), (2, 9.0)]) == pytest.approx(2.0)
    text = 'inferd_kv_blocks{engine="0",state="active"} 3.0\ninferd_kv_blocks{engine="0",state="free"} 9.0\n'
    assert soak_abort.gauge(text, "inferd_kv_blocks", 'state="active"') == 3.0
    assert soak_abort.gauge(text, "inferd_other", 'state="active"') is None
