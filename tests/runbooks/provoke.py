"""Trouble on demand: a real daemon with a tiny model, brought into each state that a runbook is about, by what brings
it about in life: load, a lowered limit, a signal, a disk that is full.

Owns the daemon, its clients and how evidence of it is taken. Each provocation leaves the trouble in place; the tests
say what must be found. Enter at `Patient`.
"""

import contextlib
import http.client
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from runbooks import check, gather
from runbooks.evidence import Evidence, Targets
from telemetry.client import Client, Endpoint
from telemetry.events import Finding
from tests.served import Served, wait_for

PATIENCE_S = 60.0
# On a machine that also runs other tests, latencies are a finding of their own; where they are not meant, none counts.
ANY_LATENCY = Targets(ttft_seconds=1e9, inter_token_seconds=1e9, loop_lag_seconds=1e9)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def prompt(tokens: int, seed: int) -> str:
    """So many characters, which are as many tokens; another seed differs from the first character on."""
    first = _LETTERS[seed % 26] + _LETTERS[seed // 26 % 26]
    return (first + _LETTERS * (tokens // 26 + 1))[:tokens]


class Patient(Served):
    """A daemon that is asked how it is."""

    def evidence(self, targets: Targets = ANY_LATENCY) -> Evidence:
        return gather.live(Client(Endpoint(socket=self.runtime / "control.sock")), targets)

    def findings(self, targets: Targets = ANY_LATENCY) -> list[Finding]:
        return check.examine(self.evidence(targets))

    def until(self, runbook: str, targets: Targets = ANY_LATENCY) -> Finding:
        """The first finding, once it is of `runbook`."""
        last: list[Finding] = []

        def first() -> Finding | None:
            last[:] = self.findings(targets)
            return last[0] if last and last[0].runbook == runbook else None

        try:
            found: Finding = wait_for(first, PATIENCE_S, f"a first finding of {runbook}")
        except AssertionError as error:
            raise AssertionError(f"{error}; last: {last}") from None
        return found

    def complete(self, text: str, tokens: int, **more: Any) -> int:
        """One completion of exactly so many tokens; its status."""
        body = {"model": "tiny", "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
        return self.post("/v1/completions", body)[0]

    def load(self, count: int, at_once: int, prompt_tokens: int, tokens: int, seed: int = 0) -> list[int]:
        """So many completions of different prompts; their statuses."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(
                pool.map(
                    lambda i: self.complete(prompt(prompt_tokens, seed + i), tokens), range(count), timeout=PATIENCE_S
                )
            )

    @contextmanager
    def under_load(self, at_once: int, prompt_tokens: int, tokens: int) -> Iterator[None]:
        """Clients that ask again and again, until left."""
        over = False

        def client(number: int) -> None:
            count = 0
            while not over:
                with contextlib.suppress(OSError, http.client.HTTPException):  # the trouble may be that it dies
                    self.complete(prompt(prompt_tokens, 100 * number + count), tokens)
                count += 1

        with ThreadPoolExecutor(at_once) as pool:
            for number in range(at_once):
                pool.submit(client, number)
            try:
                yield
            finally:
                over = True

    def set_limits(self, **limits: int) -> None:
        status, body = self.control("/inferd/v1/tuner", "POST", {"set": limits, "why": "a test"})
        assert status == 200, body

    def ceilings(self) -> dict[str, Any]:
        value: dict[str, Any] = self.snapshot("ceilings")["ceilings"]
        return value

    def kill_engine(self) -> None:
        """SIGKILL, and wait until the daemon has started another one."""
        before = self.snapshot("state")["state"]["engine_pid"]
        os.kill(before, signal.SIGKILL)

        def another() -> bool:
            state = self.snapshot("state")["state"]
            return state["engine"] == "ready" and state.get("engine_pid") not in (before, None)

        wait_for(another, PATIENCE_S, "another engine")

    def restarted(self) -> bool:
        """It has had an engine before the one that serves."""
        state = self.snapshot("state")["state"]
        return bool(state["restarts"]) and state["engine"] == "ready"

    @contextmanager
    def stopped_engine(self) -> Iterator[int]:
        """Its process is stopped, as by a debugger or a freezer."""
        pid = self.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def stutter(self, times: int, seconds: float, gone: Callable[[], bool] = lambda: False) -> None:
        """The machine takes the engine off its cores now and then, as a busy neighbour or a hypervisor does."""
        for _ in range(times):
            if gone():
                return
            with self.stopped_engine():
                time.sleep(seconds)
            time.sleep(0.1)

    def hang_up(self, tokens: int, after_s: float, seed: int) -> None:
        """A client that gives up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        body = f'{{"model":"tiny","prompt":"{prompt(20, seed)}","max_tokens":{tokens},"ignore_eos":true,"stream":true}}'
        try:
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            time.sleep(after_s)
        finally:
            connection.close()


def aged(evidence: Evidence, seconds: float) -> Evidence:
    """The same evidence, with its past so much longer ago."""
    return replace(evidence, past=tuple(replace(d, age_seconds=d.age_seconds + seconds) for d in evidence.past))


def full_disk(directory: Path) -> None:
    """A journal whose disk is full: /dev/full refuses every write with ENOSPC."""
    state = directory / "state"
    state.mkdir(parents=True, mode=0o700)
    (state / "journal.jsonl").symlink_to("/dev/full")
