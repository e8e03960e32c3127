"""`inferd doctor` against a real daemon: every command of every runbook runs, also while nobody else would answer; and
what it says of a daemon that is dead, of a machine, and in an archive."""

import json
import os
import re
import shlex
import signal
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon import cli
from runbooks import check, machine
from runbooks.evidence import Evidence, Host
from telemetry.client import Client, Endpoint
from telemetry.events import Finding
from telemetry.snapshot import Snapshot
from tests.runbooks.provoke import ANY_LATENCY, Patient
from tests.served import wait_for

pytestmark = pytest.mark.timeout(240)
ILL_OR_WELL = (0, 10, 20)
SECRET = "sk-very-secret-key"
CONTENT = "my-private-words"
BOOKS = check.shelf()


@pytest.fixture(scope="module")
def patient(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    env = {"INFERD_ADMIN_KEY": SECRET, "INFERD_MODEL": str(tiny)}
    with Patient(tmp_path_factory.mktemp("doctor"), str(tiny), env=env) as made:
        yield made


@pytest.fixture
def inferd(patient: Patient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Path) -> Any:
    """The command line in this process, as somebody on the daemon's machine has it."""
    for name, value in {
        "RUNTIME_DIRECTORY": str(patient.runtime),
        "STATE_DIRECTORY": str(patient.state),
        "CACHE_DIRECTORY": str(tmp_path / "cache"),
        "INFERD_MODEL": str(tiny),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> int:
        return cli.run(list(words))

    return run


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def commands() -> list[str]:
    """Every line of every runbook's code blocks."""
    blocks = (block for book in BOOKS for block in re.findall(r"```sh\n(.*?)```", book.text, re.DOTALL))
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_commands_of_others_are_marked() -> None:
    others = [line for line in commands() if not line.startswith("inferd ")]
    assert others
    assert [line for line in others if not line.endswith("# not run in CI")] == []
    for book in BOOKS:
        spoken = set(re.findall(r"`(inferd [^`]+)`", book.text))
        assert {words for words in spoken if words.split()[1] not in ("doctor", "serve", "models", "bench")} == set()


def test_every_inferd_command_of_every_runbook_works(inferd: Any, patient: Patient, tmp_path: Path) -> None:
    ceilings = patient.ceilings()
    words = {
        "BUNDLE": str(tmp_path / "bundle.tar.gz"),
        "STATE_DIR": str(patient.state),
        "URL": patient.url,
        "KV_CEILING": str(ceilings["kv_blocks"]),
        "SEQS_CEILING": str(ceilings["rows"]),
        "TOKENS_CEILING": str(ceilings["step_tokens"]),
    }
    lines = sorted({line for line in commands() if line.startswith("inferd ")}, key=lambda line: "restart" in line)
    assert len(lines) > 25
    for line in lines:
        if "resume" not in line:
            inferd("doctor", "do", "resume")
        with ThreadPoolExecutor(1) as pool:
            if "REQUEST_ID" in line:
                inferd("doctor", "do", "set", f"context_limit={ceilings['max_model_len']}")
                running = pool.submit(patient.complete, "a long one", 1500)
                wait_for(lambda: patient.snapshot("requests")["requests"].get("live"), 60, "a running request")
                words["REQUEST_ID"] = patient.snapshot("requests")["requests"]["live"][0]["request_id"]
            if "simulate" in line:
                patient.load(24, 4, prompt_tokens=48, tokens=16)  # steps of all kinds, to be calibrated by
            given = re.sub(r"\b[A-Z]+(?:_[A-Z]+)*\b", lambda found: words.get(found[0], found[0]), line)
            code = inferd(*shlex.split(given)[1:])
            assert code == 0 or (code in ILL_OR_WELL and given.startswith("inferd doctor")), (given, code)
            if "REQUEST_ID" in line:
                assert running.result(60) == 200 or running.result() >= 400
    wait_for(
        patient.restarted, 60, "the engine that was restarted"
    )  # not the one that is only about to be noticed dead


def test_a_wrong_word_is_one_line(inferd: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ("doctor", "runbook", "nothing"),
        ("doctor", "runbook", "oom", "nowhere"),
        ("doctor", "do", "set", "max_num_seqs"),
        ("doctor", "do", "set", "max_num_seqs=0"),
        ("doctor", "do", "abort"),
        ("doctor", "do", "abort", "no-such-id"),
        ("doctor", "--offline", "/nowhere"),
    ):
        assert inferd(*words) not in ILL_OR_WELL, words
        said = capsys.readouterr().err.strip()
        assert said.startswith("inferd: "), said
        assert len(said.splitlines()) == 1


def test_from_an_alert_to_its_runbook_is_one_command(inferd: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Case 43: what each alert says to run prints the runbook."""
    for book in BOOKS:
        assert inferd("doctor", "runbook", book.name) == 0
        assert capsys.readouterr().out == book.text
    assert inferd("doctor", "runbook") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == check.names()


def test_it_answers_while_the_api_loop_is_saturated(
    inferd: Any, patient: Patient, capsys: pytest.CaptureFixture[str]
) -> None:
    """The doctor asks the control thread; nothing it reads waits for the API's loop."""
    over = threading.Event()

    def flood() -> None:
        body = {"model": "tiny", "prompt": "x" * 100_000}
        while not over.is_set():
            patient.post("/tokenize", body)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(flood)
        try:
            time.sleep(1.0)
            reports = []
            for _ in range(3):
                assert inferd("doctor", "--json") in ILL_OR_WELL
                reports.append(shown(capsys))
        finally:
            over.set()
    live = [report["gather_seconds"] for report in reports if report["source"] == "live"]
    assert live, "the control thread answered in time, at least once on a machine that is busy with much else"
    assert min(live) < 2.0


def test_it_answers_while_the_engine_is_stuck(
    inferd: Any, patient: Patient, capsys: pytest.CaptureFixture[str]
) -> None:
    with patient.stopped_engine():
        patient.until("wedged_engine", replace(ANY_LATENCY, stuck_seconds=1.0))
        reports = []
        for _ in range(3):  # a machine that does other things too may be slow once
            assert inferd("doctor", "--json") in ILL_OR_WELL
            reports.append(shown(capsys))
    live = [report["gather_seconds"] for report in reports if report["source"] == "live"]
    assert live
    assert min(live) < 2.0


def test_the_daemon_itself_finds_it_and_says_when_it_is_over(patient: Patient) -> None:
    """Its rounds publish a Finding, show it in the snapshot, and serve the runbook's text."""

    def shown_findings() -> set[str]:
        return {each["runbook"] for each in patient.snapshot("findings").get("findings", [])}

    wait_for(lambda: "wedged_engine" not in shown_findings(), 60, "health")
    with patient.stopped_engine():
        wait_for(lambda: "wedged_engine" in shown_findings(), 60, "a finding of the daemon's own")
    wait_for(lambda: "wedged_engine" not in shown_findings(), 60, "its end")
    client = Client(Endpoint(socket=patient.runtime / "control.sock"))
    assert client.get("/inferd/v1/runbooks/wedged_engine").decode() == check.text("wedged_engine")
    assert patient.control("/inferd/v1/runbooks/nothing")[0] == 404
    ends = [e.active for e in patient.evidence().snapshot.findings or [] if isinstance(e, Finding)]
    assert False not in ends
    assert len(patient.evidence().history) >= 2


def test_a_bundle_has_no_secrets_and_no_prompts(inferd: Any, patient: Patient, tmp_path: Path) -> None:
    patient.complete(CONTENT, 4, user=CONTENT)
    path = tmp_path / "seen.tar.gz"
    assert inferd("doctor", "--bundle", str(path)) in ILL_OR_WELL
    assert path.stat().st_mode & 0o077 == 0
    with tarfile.open(path) as archive:
        members = {member.name: archive.extractfile(member) for member in archive}
        texts = {name.removeprefix("inferd-bundle/"): file.read() for name, file in members.items() if file}
    assert {"report.txt", "snapshot.json", "settings.json", "state/journal.jsonl", "state/daemon.ring"} <= set(texts)
    for name, text in texts.items():
        assert SECRET.encode() not in text, name
        assert CONTENT.encode() not in text, name
    assert json.loads(texts["settings.json"])["admin_key"]["value"] == "(set)"


def test_a_dead_daemon_is_told_from_one_that_ended(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, kind in (("killed", signal.SIGKILL), ("ended", signal.SIGTERM)):
        patient = Patient(tmp_path / name, str(tiny))
        patient.start()
        try:
            assert patient.complete("hello", 4) == 200
            wait_for(lambda p=patient: p.snapshot("requests")["requests"]["finished"], 60, "a record")
            os.kill(patient.pid, kind)
            assert patient.process is not None
            patient.process.wait(60)
        finally:
            patient.stop()
        monkeypatch.setenv("STATE_DIRECTORY", str(patient.state))
        monkeypatch.setenv("RUNTIME_DIRECTORY", str(patient.runtime))
        for words in (("doctor", "--json", "--offline", str(patient.state)), ("doctor", "--json", "--socket", "/gone")):
            code = cli.run(list(words))
            report = shown(capsys)
            assert report["source"] == "offline"
            died = [each for each in report["findings"] if each["section"] == "the-daemon-died"]
            assert bool(died) == (kind == signal.SIGKILL), report
            assert not died or (code == 20 and report["findings"][0] == died[0])
            assert report["model"] == "tiny", "folded from the flight recorder"


def test_an_installation_is_looked_at_piece_by_piece(tmp_path: Path) -> None:
    """Hand-made: a driver, huge pages, a quota and a memory group that this machine has not."""
    for path, content in {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57  Tue",
        "proc/self/cgroup": "0::/pod\n",
        "sys/fs/cgroup/pod/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/pod/memory.current": "1000\n",
        "sys/fs/cgroup/pod/memory.max": f"{1 << 30}\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "proc/meminfo": "MemTotal: 8000000 kB\nMemAvailable: 4000000 kB\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    shared = tmp_path / "state"
    shared.mkdir()
    shared.chmod(0o777)
    place = machine.Place(
        settings={"device": "auto", "threads": 4, "memory_limit": 2 << 30, "port": 0},
        directories={"state": shared},
        root=tmp_path,
        torch_version="2.13.0+cu130",
    )
    found = {trouble.what: trouble for trouble in machine.troubles(place)}
    assert {"driver", "permissions", "threads", "huge pages", "memory limit"} <= set(found)
    assert "470" in found["driver"].found
    assert found["memory limit"].severity == "critical"
    told = check.examine(
        Evidence(
            source="live",
            at_ns=1,
            unix_seconds=1.0,
            snapshot=Snapshot(at_ns=1, unix_seconds=1.0, model="m"),
            host=Host(),
            installation=tuple(found.values()),
        )
    )
    assert (told[0].runbook, told[0].severity) == ("installation", "critical")
    assert {trouble.replace(" ", "-") for trouble in found} <= set(
        next(b for b in BOOKS if b.name == "installation").sections
    )
    cpu_build = replace(place, torch_version="2.13.0+cpu", settings={})
    assert "CPU build" in {t.what: t.found for t in machine.troubles(cpu_build)}["driver"]
    well = replace(cpu_build, root=tmp_path / "nothing", directories={"state": tmp_path})
    assert {t.what for t in machine.troubles(well)} <= {"compiler", "disk"}


def test_a_taken_port_is_told(patient: Patient) -> None:
    place = machine.Place(settings={"port": patient.port}, directories={})
    assert machine.port(place) is not None
    assert machine.port(replace(place, running=True)) is None
