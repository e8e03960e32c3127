"""Memory troubles, and requests that run without tokens: provoked in a real daemon where this machine allows it.

HAND-MADE, because no real daemon can be made to do it within a test: memory that creeps for half an hour.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from runbooks import check
from runbooks.evidence import Evidence
from telemetry.parts import MemoryView, Sample
from telemetry.snapshot import Snapshot
from tests.runbooks.provoke import ANY_LATENCY, Patient, aged, prompt
from tests.served import wait_for

pytestmark = pytest.mark.timeout(240)
MIB = 1 << 20


@pytest.fixture(scope="module")
def patient(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    # What glibc keeps for reuse differs by machine; with a fixed threshold every tensor is memory asked of the kernel.
    env = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
    with Patient(tmp_path_factory.mktemp("memory"), str(tiny), "--max-num-seqs", "8", env=env) as made:
        yield made


@contextmanager
def unread(patient: Patient, choices: int, tokens: int) -> Iterator[None]:
    """A client that asks for streams and never reads them, with buffers as small as the kernel allows."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", patient.port))
        body = (
            f'{{"model":"tiny","prompt":"hello","max_tokens":{tokens},"n":{choices},"ignore_eos":true,"stream":true,'
            '"logprobs":20,"temperature":0}'
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        client.sendall(head.encode() + body)
        yield


def test_requests_that_run_without_tokens_are_told(patient: Patient) -> None:
    """Case 27: running > 0 and a token rate of 0, while the engine ticks. The near-miss: an engine that has no work."""
    targets = replace(ANY_LATENCY, stuck_seconds=2.0)
    assert patient.complete("hello", 2) == 200
    wait_for(lambda: patient.snapshot("queue")["queue"]["running"] == 0, 60, "an idle engine")
    assert patient.findings(targets) == []
    with unread(patient, 8, 2000):
        found = patient.until("wedged_engine", targets)
        assert found.section == "running-without-tokens", found
        assert found.severity == "critical"
    wait_for(lambda: patient.findings(targets) == [], 60, "the client has gone")


def test_memory_that_ran_out_is_told(patient: Patient) -> None:
    """The kernel refuses the engine more address space. The near-miss: the same requests with room, and long ago."""
    body = {"model": "tiny", "max_tokens": 2, "logprobs": 5, "echo": True}
    for seed in range(3):
        assert patient.post("/v1/completions", {**body, "prompt": prompt(900, seed)})[0] == 200
    assert "oom" not in {each.runbook for each in patient.findings()}
    engine = psutil.Process(patient.engine_pid())
    for less in (0, 4, 8, 16, 32):  # what it has mapped and does not use just now differs
        engine.rlimit(psutil.RLIMIT_AS, (engine.memory_info().vms - less * MIB, psutil.RLIM_INFINITY))
        statuses = [patient.post("/v1/completions", {**body, "prompt": prompt(1900, seed)})[0] for seed in range(4)]
        if set(statuses) - {200}:
            break
    assert set(statuses) - {200}, "nothing was refused"
    wait_for(lambda: "oom" in {each.runbook for each in patient.findings()}, 60, "the finding")
    found = patient.until("oom")
    assert found.evidence["bundle"].startswith(str(patient.state))
    assert "oom" not in {each.runbook for each in check.examine(aged(patient.evidence(), 2000.0))}


def evidence(figures: Callable[[int], int], memory: MemoryView | None = None) -> Evidence:
    """HAND-MADE: half an hour, a sample every ten seconds."""
    samples = [Sample(at_ns=i * 10**10, running=4, unbooked_bytes=figures(i)) for i in range(180)]
    shot = Snapshot(at_ns=180 * 10**10, unix_seconds=1800.0, model="m", history=samples, memory=memory)
    return Evidence(source="live", at_ns=shot.at_ns, unix_seconds=1800.0, snapshot=shot)


def names(seen: Evidence) -> list[str]:
    return [each.runbook for each in check.examine(seen)]


def test_hand_made_memory_that_creeps_is_told_and_peaks_are_not() -> None:
    assert names(evidence(lambda i: 100 * MIB + i * MIB + (i % 7) * 50 * MIB)) == ["memory_creep"]
    assert names(evidence(lambda i: 100 * MIB + (i % 45) * 20 * MIB)) == [], "it comes back"
    assert names(evidence(lambda i: (400 if i > 90 else 100) * MIB)) == [], "it grew once"
    assert names(evidence(lambda i: 100 * MIB + i * MIB // 10)) == [], "it grew by less than matters"


def test_hand_made_memory_near_its_limit_is_told_when_measured_not_when_planned() -> None:
    def view(headroom: int, source: str) -> MemoryView:
        owners = {"weights": 1000 * MIB - headroom, "headroom": headroom}
        return MemoryView(limit_bytes=1000 * MIB, owners=owners, source=source)

    assert names(evidence(lambda _: 0, view(10 * MIB, "ledger"))) == ["oom"]
    assert names(evidence(lambda _: 0, view(10 * MIB, "plan"))) == []
    assert names(evidence(lambda _: 0, view(30 * MIB, "ledger"))) == []
