"""`inferd top --once` and `inferd doctor`, as a person calls them, answer within two seconds while the API's loop is
saturated and while the engine is wedged: a real daemon, real processes.

They give up on a daemon early enough (1.8 and 1.5 s) to say so in time, so an answer must also be a living one's. The
clock is a wall clock; what was late is reported, and asked for again.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.fakes.tiny_served import tiny_served
from tests.served import INFERD, ROOT, Served, wait_for

PATIENCE_S = 90
DEADLINE_S = 2.0
ATTEMPTS = 3
LIVE = {
    ("top", "--once"): "TTFT",
    ("top", "--json"): '"daemon":"ready"',
    ("doctor",): "daemon ready",
    ("doctor", "--json"): '"source": "live"',
}
# Bodies that take the loop milliseconds each, from so many connections that others always wait.
_FLOOD = """
import http.client, json, sys, threading
body = json.dumps({"prompt": "x" * 150_000})
def ask():
    while True:
        try:
            c = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
            c.request("POST", "/tokenize", body, {"content-type": "application/json"})
            c.getresponse().read()
        except OSError:
            pass
for _ in range(16):
    threading.Thread(target=ask).start()
"""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tiny_served(tmp_path_factory.mktemp("two-seconds"), "--max-num-seqs", "8") as daemon:
        yield daemon


@contextmanager
def saturated(served: Served) -> Iterator[None]:
    """The API's loop wakes up late, and says so."""
    flood = subprocess.Popen([sys.executable, "-c", _FLOOD, str(served.port)])
    try:
        wait_for(lambda: lag_s(served) > 0.05, PATIENCE_S, "a loop that is late")
        yield
    finally:
        flood.kill()
        flood.wait(30)


def lag_s(served: Served) -> float:
    """How late the API's loop wakes up in one case of a hundred."""
    lag: dict[str, Any] = served.snapshot("latency")["latency"]["loop_lag"]["api"]
    return float(lag.get("p99") or 0.0)


@contextmanager
def wedged(served: Served) -> Iterator[None]:
    """The engine is stopped for longer than the doctor puts up with."""
    pid = served.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: served.snapshot("state")["state"]["progress_age_ns"] > 11e9, PATIENCE_S, "a wedged engine")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def asked(served: Served, words: tuple[str, ...], code: int | None, live: str) -> str:
    """What it printed of the daemon that lives, which is what `live` tells."""
    env = {**os.environ, "RUNTIME_DIRECTORY": str(served.runtime), "STATE_DIRECTORY": str(served.state)}
    for _ in range(ATTEMPTS):
        began, before = time.monotonic(), children_cpu_s()
        done = subprocess.run([*INFERD, *words], env=env, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT)
        took_s, cpu_s = time.monotonic() - began, children_cpu_s() - before
        good = done.returncode in (0, 10, 20) if code is None else done.returncode == code
        if good and live in done.stdout and took_s < DEADLINE_S:
            return done.stdout
        why = f"inferd {' '.join(words)}: {took_s:.1f} s, {cpu_s:.1f} s of them its own, exit code {done.returncode}"
        warnings.warn(why, stacklevel=2)
    raise AssertionError((why, done.stdout, done.stderr))


def children_cpu_s() -> float:
    """Of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_while_the_api_loop_is_saturated(served: Served) -> None:
    with saturated(served):
        for words, live in LIVE.items():
            asked(served, words, None, live)
        assert lag_s(served) > 0.05, "and the loop still was"


def test_while_the_engine_is_wedged(served: Served) -> None:
    with wedged(served):
        said = {words: asked(served, words, 20 if words[0] == "doctor" else 0, live) for words, live in LIVE.items()}
    report = json.loads(said["doctor", "--json"])
    assert report["findings"][0]["runbook"] == "wedged_engine"
    assert "CRITICAL wedged_engine: the engine is stuck" in said["doctor",]
    assert json.loads(said["top", "--json"])["state"]["progress_age_ns"] > 11e9
    assert "no progress for 1" in said["top", "--once"].splitlines()[0]
