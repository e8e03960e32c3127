"""Each runbook's trouble, provoked in a real daemon: the doctor's first finding is what was planted, and the near-miss
beside it is none."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from runbooks import check
from tests.runbooks.provoke import ANY_LATENCY, Patient, aged, full_disk
from tests.served import free_port, wait_for

pytestmark = pytest.mark.timeout(240)
BLOCK = 16


def names(found: list[check.Finding]) -> set[str]:
    return {each.runbook for each in found if each.severity != "info"}


@pytest.fixture(scope="module")
def busy(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Patient:
    with Patient(tmp_path_factory.mktemp("busy"), str(tiny), "--max-num-seqs", "8") as patient:
        yield patient


def test_a_shared_beginning_shorter_than_a_block_is_told(busy: Patient) -> None:
    """Case 37: 0 % hits is right, because the shared part is shorter than a block, and something says so."""
    shared = "s" * (BLOCK - 1)
    for number in range(40):
        assert busy.complete(shared + chr(65 + number) + "different"[: number % 9] + "x" * 20, 2) == 200
    found = busy.until("prefix_cache")
    assert found.section == "shorter-than-a-block"
    assert found.evidence["block"] == f"{BLOCK} tokens"


def test_a_beginning_of_a_whole_block_hits_and_is_no_finding(busy: Patient) -> None:
    for number in range(20):
        assert busy.complete("w" * 2 * BLOCK + chr(65 + number), 2) == 200
    assert "prefix_cache" not in {each.runbook for each in busy.findings()}


def test_a_long_prompt_flood_is_told_and_under_the_target_is_none(busy: Patient) -> None:
    assert set(busy.load(16, 8, 1500, 2)) == {200}
    shot = busy.snapshot("latency")["latency"]["ttft"]
    target_s = shot["p50"] / 2
    found = busy.until("ttft_spike", replace(ANY_LATENCY, ttft_seconds=target_s))
    assert found.section in ("others-prefill", "long-prompts"), found
    assert "ttft_spike" not in names(busy.findings(replace(ANY_LATENCY, ttft_seconds=2 * shot["p99"])))


def test_a_lowered_limit_is_told_and_one_at_its_ceiling_is_none(busy: Patient) -> None:
    with busy.under_load(12, 20, 60):
        busy.set_limits(max_num_seqs=1)
        wait_for(lambda: "low_throughput" in names(busy.findings()), 60, "the finding")
        found = busy.until("low_throughput")
        assert found.section == "a-limit-is-low"
        assert "max_num_seqs is 1, its ceiling 8" in found.evidence["limits"]
        busy.set_limits(max_num_seqs=8)
        wait_for(lambda: "low_throughput" not in names(busy.findings()), 60, "no finding, though some still wait")
        assert busy.snapshot("queue")["queue"]["running"]


def test_a_cache_that_is_too_small_is_told_and_the_same_load_with_room_is_none(busy: Patient) -> None:
    ceiling = busy.ceilings()["kv_blocks"]
    with busy.under_load(8, 100, 120):
        busy.set_limits(kv_blocks=32)
        found = busy.until("kv_pressure")
        assert found.section == "the-limit-is-below-the-ceiling"
        assert "kv_blocks is 32" in found.evidence["limit"]
        busy.set_limits(kv_blocks=ceiling)
        wait_for(lambda: "kv_pressure" not in names(busy.findings()), 60, "no finding")


def test_an_engine_that_is_killed_again_and_again_is_told(busy: Patient) -> None:
    """The near-miss: it was killed once, which is a remark; and one that was long ago."""
    busy.kill_engine()
    wait_for(lambda: "crash_loop" in {each.runbook for each in busy.findings()}, 60, "the remark")
    assert "crash_loop" not in names(busy.findings())
    for _ in range(2):
        busy.kill_engine()
    wait_for(lambda: "critical" in {each.severity for each in busy.findings()}, 60, "the finding")
    found = busy.until("crash_loop")
    assert (found.severity, found.section) == ("critical", "killed-from-outside")
    assert "killed × 3" in found.evidence["causes"]
    assert "crash_loop" not in {each.runbook for each in check.examine(aged(busy.evidence(), 1000))}


@pytest.fixture(scope="module")
def calm(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Patient:
    """Two rows, a queue of four; its traces go to a collector that is not there."""
    env = {
        "INFERD_MAX_QUEUED_REQUESTS": "4",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_TRACES_SAMPLER": "always_on",
    }
    with Patient(tmp_path_factory.mktemp("calm"), str(tiny), "--max-num-seqs", "2", env=env) as patient:
        yield patient


def test_lost_traces_are_told(calm: Patient) -> None:
    assert calm.findings() == [], "nothing was sent yet"
    calm.load(2, 1, 10, 2)
    found = calm.until("telemetry_lost")
    assert found.section == "trace"


def test_requests_turned_away_are_told_and_a_full_queue_alone_is_not(calm: Patient) -> None:
    assert set(calm.load(12, 6, 10, 20)) == {200}
    assert "overload" not in names(calm.findings())
    statuses = calm.load(60, 30, 10, 60, seed=50)
    assert 429 in statuses
    found = calm.until("overload")
    assert found.section == "clients-or-capacity"


def test_answers_that_get_shorter_while_others_wait_are_told(tiny: Path, tmp_path: Path) -> None:
    """The near-miss: clients that give up on an idle machine, so that nobody waits. bf16 has no compiled kernels: slow
    enough that clients can give up."""
    with Patient(tmp_path, str(tiny), "--max-num-seqs", "2", "--dtype", "bfloat16") as patient:
        patient.load(24, 2, 20, 300)  # long answers: what the few that run get before their clients leave is far less
        for number in range(3):
            patient.hang_up(1500, 0.05, number)
        assert "short_answers" not in names(patient.findings())
        with ThreadPoolExecutor(24) as pool:
            list(pool.map(lambda seed: patient.hang_up(1500, 0.5, seed), range(30), timeout=60))
        found = patient.until("short_answers")
        assert found.section == "clients-give-up"


def test_a_full_disk_is_told(tiny: Path, tmp_path: Path) -> None:
    full_disk(tmp_path)
    with Patient(tmp_path, str(tiny)) as patient:
        found = patient.until("disk_full")
        assert "journal" in found.summary


def test_a_machine_that_is_not_ours_alone_is_told(tiny: Path, tmp_path: Path) -> None:
    """Streams stutter because the engine is taken off its cores; on the same machine, left alone, they do not."""
    targets = replace(ANY_LATENCY, inter_token_seconds=0.5)
    with Patient(tmp_path, str(tiny), "--max-num-seqs", "4", "--dtype", "bfloat16") as patient:
        assert set(patient.load(2, 1, 20, 60)) == {200}
        assert "slow_decode" not in names(patient.findings(replace(ANY_LATENCY, inter_token_seconds=5.0)))
        state = SimpleNamespace(done=False)
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(patient.load, 4, 4, 20, 200)
            stream.add_done_callback(lambda _: setattr(state, "done", True))
            while not stream.done():
                patient.stutter(1, 0.8, lambda: state.done)
            assert set(stream.result(60)) == {200}
        found = patient.until("slow_decode", targets)
        assert found.section == "the-machine", found


def test_a_stuck_engine_is_told_and_a_slow_one_is_not(tiny: Path, tmp_path: Path) -> None:
    with Patient(tmp_path, str(tiny)) as patient:
        targets = replace(ANY_LATENCY, stuck_seconds=3.0)
        with patient.under_load(2, 1500, 20):
            time.sleep(2.0)
            assert "wedged_engine" not in names(patient.findings(targets)), "it computes long prompts"
            with patient.stopped_engine() as pid:
                found = patient.until("wedged_engine", targets)
                assert (found.severity, found.section) == ("critical", "stopped")
                assert str(pid) in found.next_step
        wait_for(lambda: "wedged_engine" not in names(patient.findings(targets)), 60, "well again")


def test_a_start_that_takes_too_long_is_told(tiny: Path, tmp_path: Path) -> None:
    patient = Patient(tmp_path, str(tiny))
    try:
        patient.start(wait=False)
        wait_for(lambda: patient.engine_pids() and (patient.runtime / "control.sock").exists(), 60, "an engine process")
        assert patient.findings() == [], "it has only begun"
        with patient.stopped_engine():
            found = patient.until("slow_start", replace(ANY_LATENCY, start_seconds=1.0))
            assert found.section == "stopped"
        patient.wait_ready(120)
        assert patient.findings(replace(ANY_LATENCY, start_seconds=1.0)) == []
    finally:
        patient.stop()
