"""`inferd tune`: answers from what was learned, and one clear line where there is nothing to answer from."""

import json
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from autotune.memory import Learned, Memory, key
from daemon.cli import run
from telemetry.events import RequestRecord
from tests.autotune.engines import COST, begins, engine
from tests.autotune.records import record


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nobody serves."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("INFERD_SOCKET", raising=False)
    return tmp_path


@pytest.fixture
def learned(state: Path) -> Path:
    resolved = engine()
    resolved_facts = {name: value for name, value in asdict(resolved).items() if name != "reasons"}
    entry = Learned(limits=asdict(begins(resolved)), cost=asdict(COST), cost_error=0.03, resolved=resolved_facts)
    Memory(state).put(key("tiny", resolved, "1"), entry)
    return state


def test_without_a_daemon_and_without_anything_learned_it_says_what_to_do(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tune", "simulate", "--socket", str(state / "none.sock")]) != 0
    error = capsys.readouterr().err
    assert "nothing to calibrate" in error
    assert "serve some requests first" in error
    assert len(error.strip().splitlines()) == 1


def test_what_at_twice_the_load(learned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["tune", "simulate", "--learned", "tiny", "--rate", "1", "--seconds", "120", "--times", "2"]
    assert run([*asked, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    once, twice = report["runs"]
    assert (once["times"], twice["times"]) == (1.0, 2.0)
    assert 1.6 * once["offered"] < twice["offered"] < 2.4 * once["offered"]
    assert twice["utilisation"] > once["utilisation"]
    assert run(asked) == 0
    text = capsys.readouterr().out
    assert "predicted to 3.0%" in text
    assert "At 2 x the load:" in text


def test_how_many_replicas_for_a_trace(learned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"at_s": n / 8, "prompt_tokens": 800, "output_tokens": 60}) for n in range(400)]
    (learned / "trace.jsonl").write_text("\n".join(lines))
    asked = ["tune", "simulate", "--learned", "tiny", "--trace", str(learned / "trace.jsonl"), "--replicas"]
    assert run([*asked, "--for", "chat", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["replicas"]
    assert rows[-1]["enough"]
    assert not rows[0]["enough"]


def test_the_error_against_a_recorded_run_is_printed(learned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records: list[RequestRecord] = [record(n, arrival_s=n, prompt=100, output=20, ttft_s=0.2) for n in range(1, 30)]
    lines = [b'{"unix_seconds":1.0,"event":%s}' % msgspec.json.encode(r) for r in records]
    (learned / "journal.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert run(["tune", "simulate", "--learned", "tiny", "--journal", str(learned / "journal.jsonl")]) == 0
    text = capsys.readouterr().out
    assert "Against what was recorded:" in text
    assert "off by" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "1", "--users", "2"], "both say what arrives"),
        (["--trace", "/nowhere.jsonl"], "cannot read the trace"),
        (["--journal", "/nowhere.jsonl"], "no request that was served"),
    ],
)
def test_mistakes_are_one_line(
    learned: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run(["tune", "simulate", "--learned", "tiny", *arguments]) != 0
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_a_broken_file_counts_as_nothing_learned(state: Path) -> None:
    (state / "tuner.json").write_text("{")
    memory = Memory(state)
    assert memory.names() == []
    assert "cannot be used" in memory.trouble
