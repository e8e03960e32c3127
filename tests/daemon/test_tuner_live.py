"""The tuner of a real daemon under real load: it changes a limit by itself and says what came of it, keeps still when
frozen, and knows after a kill what it had learned. Nothing here calls it: that its task runs at all is part of this."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.tiny_served import MODEL, Load, tiny_model
from tests.served import INFERD, ROOT, Served, wait_for

pytestmark = pytest.mark.timeout(400)
PATIENCE_S = 150
HASTY = [sys.executable, "-m", "tests.fakes.hasty_main"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("tuner")
    model = tiny_model(directory / "model")
    daemon = Served(
        directory, str(model), "--served-model-name", MODEL, "--memory-limit", "600MiB", command=HASTY
    )  # fmt: skip
    with daemon:
        yield daemon


def decisions(served: Served) -> list[dict[str, Any]]:
    return list(served.snapshot("decisions")["decisions"])


def samples(served: Served, name: str) -> dict[str, float]:
    """Of a family of the metrics: value by its only label that differs."""
    text = served.get("/metrics")[1].decode()
    (family,) = (f for f in text_string_to_metric_families(text) if f.name == name)
    return {"|".join(v for k, v in s.labels.items() if k not in ("model", "engine")): s.value for s in family.samples}


def steer(served: Served, **order: Any) -> dict[str, Any]:
    status, body = served.control("/inferd/v1/tuner", "POST", order)
    assert status == 200, body
    answer: dict[str, Any] = json.loads(body)
    return answer


def inferd(served: Served, *words: str) -> str:
    env = {
        **os.environ, "RUNTIME_DIRECTORY": str(served.runtime), "STATE_DIRECTORY": str(served.state),
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run([*INFERD, *words], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_it_changes_by_itself_rests_when_frozen_and_remembers_after_a_kill(served: Served) -> None:
    steer(served, set={"max_num_seqs": 1}, why="a wrong profile")
    steer(served, release=True)
    with Load(served, 16, "tell me about rivers and mountains and the sea", 24):
        kept = slowly(lambda: _grown(served), "a limit that was raised and kept")[0]
        assert (kept["direction"], kept["before"]) == ("up", 1)
        assert kept["evidence"]["running"] > 0
        assert kept["predicted"]["goodput"] > 0
        assert kept["measured"]["after"] > 0 < kept["measured"]["before"]
        _holds_the_hard_line(served)
        _stays_still_when_frozen(served)
        _is_told_everywhere(served, kept)
    _is_remembered(served)


def slowly(condition: Callable[[], Any], what: str) -> Any:
    """wait_for, asking twice a second: this is a busy daemon."""

    def asked() -> Any:
        time.sleep(0.5)
        return condition()

    return wait_for(asked, PATIENCE_S, what)


def _grown(served: Served) -> list[dict[str, Any]]:
    rules = ("growth", "slow_start")
    return [d for d in decisions(served) if d["rule"] in rules and d["verdict"].startswith("kept")]


def _holds_the_hard_line(served: Served) -> None:
    """By what is measured to be in use, not by what was planned: the daemon's own bytes count too."""

    def held() -> bool:
        found = served.snapshot("memory,kv,limits")
        memory, kv = found["memory"], found["kv"]
        beside = memory["used_bytes"] - kv["active"] * kv["block_bytes"]
        most = found["limits"]["kv_blocks"] * kv["block_bytes"]
        return memory["source"] == "ledger" and beside + most <= 0.86 * memory["limit_bytes"]

    slowly(held, "kv_blocks at the hard line of what is measured")


def test_a_target_that_cannot_be_met_is_a_finding_that_says_which_and_why(tmp_path: Path) -> None:
    """No machine makes a first token in a microsecond."""
    model = tiny_model(tmp_path / "model")
    flags = ("--served-model-name", MODEL, "--memory-limit", "600MiB", "--target-ttft", "0.000001")
    with Served(tmp_path, str(model), *flags, command=HASTY) as daemon, Load(daemon, 4, "tell me about rivers", 16):

        def told() -> list[dict[str, Any]]:
            return [f for f in daemon.snapshot("findings")["findings"] if f["runbook"] == "missed_targets"]

        (found,) = slowly(told, "a finding of missed targets")
        assert "time to first token" in found["summary"]
        assert "1e-06 s is wanted" in found["summary"]
        assert set(daemon.snapshot("missed_targets")["missed_targets"]) == {"ttft_s"}
        assert "target ttft_s is missed" in inferd(daemon, "tune", "status")
        exposed = lambda: samples(daemon, "inferd_target_missed") == {"ttft": 1, "inter_token": 0}  # noqa: E731
        slowly(exposed, "the metric of a missed target")  # a moment without a first token, and it is met


def _stays_still_when_frozen(served: Served) -> None:
    """While the same load goes on; a trial under way is let go without a verdict."""
    assert steer(served, freeze=True)["tuner"]["state"] == "frozen"
    before, limits = decisions(served), served.snapshot("limits")["limits"]
    steps = served.snapshot("totals")["totals"]["output_tokens"]
    began = served.snapshot("state")["at_ns"]
    slowly(lambda: served.snapshot("state")["at_ns"] > began + 6e9, "six control periods")
    assert served.snapshot("totals")["totals"]["output_tokens"] > steps  # there was something to decide about
    assert decisions(served) == before
    assert served.snapshot("limits")["limits"] == limits


def _is_told_everywhere(served: Served, kept: dict[str, Any]) -> None:
    """Metrics, journal, log and command line say what the snapshot says."""
    counted = samples(served, "inferd_tuner_decisions")
    assert sum(counted.values()) == len(decisions(served))
    in_force = served.snapshot("limits")["limits"]
    assert samples(served, "inferd_tuner_limit") == {name: float(value) for name, value in in_force.items()}
    told = inferd(served, "tune", "log")
    assert kept["why"] in told
    assert kept["verdict"] in told
    assert f"{kept['rule']} {kept['knob']} {kept['before']} → {kept['after']}, kept" in served.log
    journal = (served.state / "journal.jsonl").read_text(encoding="utf-8")
    assert kept["verdict"] in journal


def _is_remembered(served: Served) -> None:
    """A kill -9 of the daemon: the next one begins with the limits that proved themselves, frozen as it was."""
    learned = json.loads((served.state / "tuner.json").read_text())["entries"]
    (entry,) = learned.values()
    assert entry["frozen"]
    assert entry["limits"]["max_num_seqs"] > 1
    os.kill(served.pid, signal.SIGKILL)
    assert served.process is not None
    served.process.wait(60)
    served.start()
    status = json.loads(served.control("/inferd/v1/tuner")[1])
    assert status["state"] == "frozen"
    rows = status["limits"]["max_num_seqs"]
    assert (rows["value"], rows["source"]) == (entry["limits"]["max_num_seqs"], "start")
    assert f"as learned before, in {entry['decisions']} decisions" in rows["why"]
    assert status["step_cost"]
