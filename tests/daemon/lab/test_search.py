"""The search: killed and resumed it keeps what it had, and what it ends in is a profile that serve takes."""

import json
import os
import signal
import subprocess
from pathlib import Path

import optuna
import psutil
import pytest
from click.testing import CliRunner
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from daemon.commands import tune
from daemon.lab import knobs, record, search
from daemon.lab.trial import OBJECTIVES
from daemon.settings import NAMES, load
from engine.errors import ConfigError
from tests.daemon.lab import made
from tests.fakes.tiny_served import tiny_model
from tests.served import INFERD, ROOT, wait_for

PATIENCE_S = 120


def trials(store: Path) -> list[optuna.trial.FrozenTrial]:
    if not store.exists():
        return []
    try:
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(store)))
        return optuna.load_study(study_name="search", storage=storage).get_trials()
    except KeyError:  # the file is there, the study not yet
        return []


def test_flags_name_what_there_is() -> None:
    assert tune._KNOBS == knobs.NAMES
    assert tuple(OBJECTIVES) == tune._OBJECTIVES
    assert set(knobs.NAMES) <= set(NAMES)


def test_the_machines_own_choice_is_always_among_the_values() -> None:
    own = {"block_size": 16, "dtype": "float16", "threads": 3, "rows": 64, "step_tokens": 512}
    values = knobs.choices(own, knobs.NAMES)
    for name, value in knobs.resolved(own, knobs.NAMES).items():
        assert value in values[name]
        assert len(values[name]) == len(set(values[name])) > 1


def test_failures_count_against_an_objective() -> None:
    run = made.run()
    all_well = {**run.figures, "goodput_tokens_per_s": 90.0, "requests": 10.0, "failed": 0.0}
    half = {**all_well, "failed": 10.0}
    for name, objective in OBJECTIVES.items():
        good, bad = (objective.value(record.Run(side="", seconds=1.0, figures=figures)) for figures in (all_well, half))
        assert (bad < good) is objective.most, name


def test_a_profile_is_a_file_of_settings(tmp_path: Path) -> None:
    text = search.profile_text(made.report(notes=("a note",)), {"block_size": 32, "dtype": "float32"})
    (tmp_path / "p.toml").write_text(text)
    settings = load(environ={}, profile=str(tmp_path / "p.toml")).settings
    assert (settings.block_size, settings.dtype) == (32, "float32")
    assert "# a note" in text


@pytest.mark.parametrize("span", ["30", "m", "-1m", "1d", ""])
def test_a_budget_that_is_no_time_is_refused(span: str) -> None:
    done = CliRunner().invoke(tune.command, ["search", "--budget", span])
    assert done.exit_code == 2
    assert "is not a time such as" in done.output


def test_two_searches_on_one_journal_do_not_run_at_once(tmp_path: Path) -> None:
    """And whoever holds it lets go when it ends, so that the next one can go on."""
    store = tmp_path / "s.journal"
    words = ["search", "nothing", "--store", str(store), "--profile", str(tmp_path / "p.toml")]
    with search._alone(store):
        second = CliRunner().invoke(tune.command, words)
    assert isinstance(second.exception, ConfigError)
    assert f"another search is using {store}" in second.exception.message
    with search._alone(store):
        assert store.stat().st_size == 0


def test_goodput_needs_a_target() -> None:
    done = CliRunner().invoke(tune.command, ["search", "--objective", "goodput"])
    assert done.exit_code == 2
    assert "give --ttft" in done.output


@pytest.mark.timeout(400)
def test_killed_and_resumed(tmp_path: Path) -> None:
    """SIGKILL in the middle of a trial: nothing of it is left running, the trial is tried again, no result is lost."""
    model = tiny_model(tmp_path / "model")
    store, profile, page = tmp_path / "s.journal", tmp_path / "p.toml", tmp_path / "s.html"
    words = [*INFERD, "tune", "search", str(model), "--store", str(store), "--profile", str(profile)]
    words += ["--requests", "8", "--concurrency", "4", "--longest", "512", "--knob", "block_size", "--confirm", "0"]
    words += ["--memory-limit", "600MiB", "--report", str(page)]
    first = subprocess.Popen([*words, "--trials", "50"], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: any(t.state is TrialState.RUNNING and t.params for t in trials(store)), PATIENCE_S, "a trial")
        children = psutil.Process(first.pid).children(recursive=True)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait(30)
    wait_for(lambda: not any(child.is_running() for child in children), PATIENCE_S, "its daemon is gone too")
    (cut_off,) = [t for t in trials(store) if t.state is TrialState.RUNNING]
    kept = [t for t in trials(store) if t.state is TrialState.COMPLETE]
    assert kept, "the defaults"
    done = subprocess.run(
        [*words, "--trials", str(len(kept) + 1), "--json"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    now = trials(store)
    assert [t for t in now if t.number in {k.number for k in kept}] == kept, "nothing was measured again"
    assert now[cut_off.number].state is TrialState.FAIL
    assert now[cut_off.number + 1].params == cut_off.params, "what was cut off came first"
    report = record.load(tmp_path / "s.json")
    assert json.loads(done.stdout)["kind"] == report.kind == "search"
    assert len(report.runs) == len(kept) + 1
    assert "Trials" in page.read_text()
    assert load(environ={}, profile=str(profile)).settings.model == "smollm2", "a profile says nothing of the model"
    other = subprocess.run([*words, "--objective", "ttft"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert other.returncode == ConfigError.exit_code
    assert "the journal of another search, with objective throughput" in other.stderr
