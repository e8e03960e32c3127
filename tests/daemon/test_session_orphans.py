"""`kill -9` of the daemon: its engine is gone within 2 s, whatever it is doing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_BUSY_S = 20  # that a machine may take longer, which does other things too; it would live on for a minute
REPOSITORY = Path(__file__).parents[2]
DAEMON = """
import asyncio, sys
from pathlib import Path
from tests.fakes.sessions import request, session

async def main(faults):
    async with session(Path(sys.argv[1]), wait=False, **faults) as running:
        await running.until(lambda: running.session.engine_pid is not None)
        if "load_s" not in faults:
            await running.session.wait_ready()
            running.session.submit([request("r", 1_000_000)])
        print(running.session.engine_pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main(eval(sys.argv[2])))
"""


def state_of(pid: int) -> str:
    """The kernel's letter for the process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "faults", [{}, {"hang_at_step": 1}, {"spin_at_step": 1}, {"load_s": 60}], ids=["serving", "hangs", "spins", "loads"]
)
def test_the_engine_does_not_outlive_the_daemon(tmp_path: Path, faults: dict[str, float]) -> None:
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(tmp_path), repr(faults)], stdout=subprocess.PIPE, cwd=REPOSITORY
    )
    try:
        assert daemon.stdout is not None
        engine = int(daemon.stdout.readline())
        assert state_of(engine) in "RSD"
    finally:
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.wait()
    deadline = time.monotonic() + 2 + _BUSY_S
    while state_of(engine) not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state_of(engine) in ("", "Z")


@pytest.mark.timeout(120)
def test_the_end_of_the_pipe_alone_is_enough(tmp_path: Path) -> None:
    """Where the kernel's parent-death signal does not reach (it is tied to a thread), the pipe's end does."""
    code = (
        "import os, time; from engine.process import guard; guard(os.getppid()); print(1, flush=True); time.sleep(99)"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdout.readline()
    engine.stdin.close()
    assert engine.wait(2 + _BUSY_S) == 70
