"""Soak: judged by slopes, and run for seconds against a real daemon of a tiny model."""

import subprocess
from pathlib import Path

import msgspec
import pytest

from daemon.commands import bench
from daemon.lab import record, soak
from daemon.lab.record import Run, Verdict
from daemon.lab.verdicts import judged
from tests.daemon.lab import made
from tests.fakes.tiny_served import tiny_served
from tests.served import INFERD, ROOT


def failed(run: Run) -> set[str]:
    return {verdict.name for verdict in judged(run, 8) if verdict.passed is False}


def changed(run: Run, name: str, by: float) -> Run:
    """One series grows by the factor `by` from its begin to its end."""
    series = tuple(
        msgspec.structs.replace(
            s, values=tuple((v or 0) * (1 + (by - 1) * n / len(s.values)) for n, v in enumerate(s.values))
        )
        if s.name == name
        else s
        for s in run.series
    )
    return msgspec.structs.replace(run, series=series)


def steady() -> Run:
    """Ten minutes without an error."""
    run = made.run(seconds=600)
    return msgspec.structs.replace(
        run, requests=tuple(msgspec.structs.replace(request, error="") for request in run.requests)
    )


def test_what_is_steady_holds() -> None:
    verdicts = judged(steady(), 8)
    assert not failed(steady())
    assert sum(verdict.passed is True for verdict in verdicts) >= 8


@pytest.mark.parametrize(
    ("series", "by", "said"),
    [
        ("memory.runtime", 1.4, "short: memory of runtime"),
        ("queue.waiting", 9.0, "short: queue"),
        ("rate.decode", 0.5, "short: throughput"),
        ("memory.in use", 1.8, "short: memory in use"),
    ],
)
def test_each_drift_is_found_alone(series: str, by: float, said: str) -> None:
    assert failed(changed(steady(), series, by)) == {said}


def test_latencies_that_creep_are_found_by_kind() -> None:
    slower = tuple(
        msgspec.structs.replace(r, ttft_s=(r.ttft_s or 0) * (1 + r.at_s / 600)) if r.kind == "long" else r
        for r in steady().requests
    )
    found = failed(msgspec.structs.replace(steady(), requests=slower))
    assert found == {"short: time to first token, long requests"}


def test_a_pool_that_fills_is_no_leak() -> None:
    assert not failed(changed(steady(), "memory.kv_active", 1.5))
    assert not failed(changed(steady(), "process.engine", 1.5))


def test_refusals_fail_and_so_does_silence() -> None:
    refused = tuple(
        msgspec.structs.replace(r, error="http_429" if n % 20 == 0 else "") for n, r in enumerate(steady().requests)
    )
    assert "short: answers" in failed(msgspec.structs.replace(steady(), requests=refused))
    assert "short: answers" in failed(msgspec.structs.replace(steady(), requests=()))


def test_a_few_samples_are_not_judged() -> None:
    verdicts = judged(made.run(seconds=6), 8)
    assert {v.passed for v in verdicts if "memory of" in v.name or "throughput" in v.name} == {None}


def test_exit_codes() -> None:
    def code(*passed: bool | None) -> int:
        verdicts = tuple(Verdict(name="short: throughput", passed=p, why="") for p in passed)
        return soak.exit_code(made.report(verdicts=verdicts))

    assert (code(True, None), code(True, False), code(None, None)) == (0, 1, 3)


def test_the_command_knows_every_phase() -> None:
    assert tuple(soak.PHASES) == bench._PHASES


@pytest.mark.timeout(300)
def test_a_soak_of_seconds(tmp_path: Path) -> None:
    target = tmp_path / "soak.html"
    with tiny_served(tmp_path, "--max-num-seqs", "8", env={"INFERD_TUNER": "false"}) as served:
        flags = ["--url", served.url, "--socket", str(served.runtime / "control.sock"), "--phase-seconds", "4"]
        done = subprocess.run(
            [*INFERD, "bench", "soak", *flags, "--phase", "short", "--phase", "mixed", "--report", str(target)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=280,
        )
    report = record.load(tmp_path / "soak.json")
    assert done.returncode == soak.exit_code(report) != 2, done.stderr
    assert report.sides == ["short", "mixed"]
    for run in report.runs:
        assert run.requests, "something was answered"
        assert {"memory.runtime", "memory.in use", "queue.waiting", "rate.decode"} <= {s.name for s in run.series}
        assert run.limit_bytes == 600 << 20
    driven = [verdict for verdict in report.verdicts if verdict.name.endswith("driven to the watermark")]
    assert len(driven) == 2
    assert all(v.why.startswith("reached") or "max_num_seqs 8" in v.why or "in use" in v.why for v in driven)
    assert "short: " in done.stderr, "progress is shown"
    assert "Memory over time" in target.read_text()


def test_a_server_that_is_no_inferd_is_refused_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [*INFERD, "bench", "soak", "--url", "http://127.0.0.1:9", "--socket", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
