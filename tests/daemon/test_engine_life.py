"""What a killed daemon leaves in the runtime directory, and how an engine's end is told apart."""

import signal
import subprocess
from pathlib import Path

import pytest

from daemon import casualty
from daemon.engine_life import Death, sweep
from engine import wire


def test_only_what_a_dead_daemon_left_is_swept(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = {f"engine-{dead.pid}-abc": False, f"engine-{Path('/proc/self').resolve().name}-abc": True, "engine-x": True}
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "c").touch()
    sweep(tmp_path)
    assert {name: (tmp_path / name).exists() for name in names} == names
    sweep(tmp_path / "missing")


@pytest.mark.parametrize(
    ("exit_code", "oom_kills", "fault", "cause"),
    [
        (-signal.SIGKILL, 0, None, "killed"),
        (-signal.SIGKILL, 1, None, "oom_killed"),
        (-signal.SIGSEGV, 0, None, "crash"),
        (-signal.SIGSEGV, 1, None, "crash"),
        (1, 0, None, "crash"),
        (5, 0, wire.Fault(code="out_of_memory", message="m"), "oom"),
        (5, 0, wire.Fault(code="engine_fault", message="m"), "crash"),
        (0, 0, None, "crash"),  # it said no last word
    ],
)
def test_the_cause_of_death(exit_code: int, oom_kills: int, fault: wire.Fault | None, cause: str) -> None:
    death = Death.of(exit_code, oom_kills=oom_kills, fault=fault, last_lines=("the last line",))
    assert death.cause == cause
    assert death.detail
    assert not death.lacked_memory


@pytest.mark.parametrize(
    ("exit_code", "fault", "words"),
    [
        (-signal.SIGABRT, None, "terminate called after throwing an instance of 'std::bad_alloc'"),
        (-signal.SIGABRT, None, "FATAL ERROR: OUT OF MEMORY (src/zmq.cpp:1)"),
        (1, None, "MemoryError"),
        (5, wire.Fault(code="internal_error", message="MemoryError: "), ""),
    ],
)
def test_a_death_for_want_of_memory_is_told_by_the_last_words(
    exit_code: int, fault: wire.Fault | None, words: str
) -> None:
    death = Death.of(exit_code, fault=fault, last_lines=(words,))
    assert (death.cause, death.lacked_memory) == ("oom", True)
    incident = casualty.of(death, "e", served=True, victims=("r",), at_ns=5)
    assert incident is not None
    assert (incident.kind, incident.cause, incident.request_ids) == ("oom", "unknown", ("r",))
    assert "could not get memory" in incident.summary


def test_an_out_of_memory_that_the_engine_reported_itself_is_not_told_twice() -> None:
    death = Death.of(5, fault=wire.Fault(code="out_of_memory", message="in 3 steps"), last_lines=("MemoryError",))
    assert (death.cause, death.lacked_memory) == ("oom", False)
    assert casualty.of(death, "e", served=True, victims=(), at_ns=5) is None
