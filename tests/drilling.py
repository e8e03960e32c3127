"""Drills against a real daemon under load, and what must be true of each: cause, metric, bundle, victims.

Owns the daemon on a tiny model, its clients and the checks; which drills run, and in which order, is up to who asks:
tests/daemon/test_drills.py (each once), tests/perf/drill_rounds.py (as often as fits). Enter at `Range` and `run_one`.
"""

import contextlib
import http.client
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daemon.drills import DRILLS, Drill
from runbooks import check, gather
from runbooks.evidence import Targets
from telemetry.client import Client, ClientError, Endpoint
from tests.fakes.tiny import prepare_tiny, write_tiny
from tests.served import Served, wait_for

PATIENCE_S = 120
ENDS = ("kill_engine", "wedge_for_good", "kill_both")
AMOUNTS = {"slow_client": 60_000, "full_disk": 3000}  # ms that they last, unless they are ended
PRESSED_S = 8
UNHURRIED = Targets(ttft_seconds=1e9, inter_token_seconds=1e9, loop_lag_seconds=1e9)


class Range(Served):
    """A daemon that is drilled. Its model is so shaped that a long prompt's activations, and the log-probabilities of a
    short one, are each larger than what a typical step takes: 12 x intermediate bytes a token against 4 x vocabulary a
    row."""

    def __init__(self, directory: Path, deadline_s: float) -> None:
        model = write_tiny("llama", directory / "tiny", vocab_size=12288, intermediate_size=1024)
        prepare_tiny(directory / "tiny", model)
        super().__init__(
            directory,
            str(directory / "tiny"),
            *("--drill", "all", "--drill", "collector_down", "--max-num-seqs", "16", "--memory-limit", "2GiB"),
            env={
                "INFERD_PROGRESS_DEADLINE": str(deadline_s),
                "INFERD_API_KEY": "",
                "INFERD_SERVED_MODEL_NAME": "tiny",
                "INFERD_TUNER": "false",
                "INFERD_THREADS": "2",  # each has a heap of its own: with many, address space means something else
            },
        )

    def set_limits(self, **limits: int) -> None:
        status, body = self.control("/inferd/v1/tuner", "POST", {"set": limits, "why": "so that it shows"})
        assert status == 200, body

    def drill(self, name: str, amount: int = 0) -> None:
        status, body = self.control(f"/inferd/v1/drill/{name}", "POST", {"amount": amount})
        assert status == 200, body

    def exposition(self) -> str:
        return self.control("/metrics")[1].decode()

    def metric(self, series: str) -> float:
        """The sum of the samples that `series` (a name, or one with labels) selects."""
        name, _, labels = series.partition("{")
        wanted = set(labels.rstrip("}").split(",")) - {""}
        total = 0.0
        for line in self.exposition().splitlines():
            found = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+).*", line)
            if found and found[1] == name and wanted <= set((found[2] or "").split(",")):
                total += float(found[3])
        return total

    def incidents(self) -> dict[str, Any]:
        _, body = self.control("/inferd/v1/incidents")
        return {each["incident_id"]: each for each in json.loads(body)["incidents"]}

    def since(self, known: dict[str, Any], kind: str) -> list[Any]:
        """Incidents of a kind that are not among the `known`."""
        return [each for name, each in self.incidents().items() if name not in known and each["kind"] == kind]

    def report(self, incident: Any) -> Any:
        """Its bundle, or None as long as there is none."""
        _, body = self.control(f"/inferd/v1/incidents/{incident['incident_id']}")
        return json.loads(body)["report"]

    def first(self, since: float) -> tuple[str, str] | None:
        """Where the doctor's first finding leads, looking at nothing older than `since`. On a machine that runs other
        tests too, latencies are a finding of their own: none counts here."""
        try:
            evidence = gather.live(Client(Endpoint(socket=self.runtime / "control.sock")), UNHURRIED)
        except ClientError:
            return None
        found = check.examine(evidence.within(time.monotonic() - since))
        places = [(each.runbook, each.section) for each in found]
        collector = DRILLS["collector_down"]  # all the time here, beside whatever else is planted
        return next((place for place in places if place != (collector.runbook, collector.section)), None)

    def kill_both(self) -> None:
        """Returns once they are dead."""
        assert self.process is not None
        with contextlib.suppress(OSError):  # it may not even get to answer
            self.control("/inferd/v1/drill/kill_both", "POST", {})
        assert self.process.wait(60) == -9


def steady(number: int, round_: int) -> dict[str, Any]:
    """The same short question in many wordings."""
    return {"prompt": f"{number}{round_ % 97:02}ab", "max_tokens": 40}


def mixed(number: int, round_: int) -> dict[str, Any]:
    """Short and longer, whole and streamed, one choice or two, with log-probabilities or without."""
    chance = random.Random(1000 * number + round_)
    return {
        "prompt": "".join(chance.choice("abcdefgh") for _ in range(chance.randrange(3, 24))),
        "max_tokens": chance.randrange(1, 64),
        "n": chance.choice((1, 1, 1, 2)),
        "stream": chance.random() < 0.3,
        "logprobs": chance.choice((None, None, 2)),
    }


class Load:
    """A few clients that ask again and again, each time what `ask` (client, round) says; what goes wrong is counted."""

    def __init__(
        self, served: Served, streams: int, ask: Callable[[int, int], dict[str, Any]] = steady, seed: int = 0
    ) -> None:
        self._served = served
        self._ask = ask
        self._seed = seed
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.streams = streams
        self.good = 0
        self.errors: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(streams)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        time.sleep(0.13 * number)
        round_ = self._seed
        while not self._over.is_set():
            round_ += 1
            body = {"model": "tiny", "temperature": 0, "ignore_eos": True, **self._ask(number, round_)}
            why = self._send(body)
            with self._lock:
                self.good += not why
                if why:
                    self.errors[why] += 1
            if why:
                time.sleep(0.2)

    def _send(self, body: dict[str, Any]) -> str:
        """Why it failed; empty if it did not."""
        try:
            if body.get("stream"):
                status, text = self._served.post_raw("/v1/completions", body)
                return "" if status == 200 and text.rstrip().endswith(b"[DONE]") and b'"error"' not in text else "cut"
            status, answer = self._served.post("/v1/completions", body)
        except (OSError, ValueError, http.client.HTTPException) as error:
            return type(error).__name__
        return "" if status == 200 else f"{status} {answer['error'].get('code')}"

    def take_errors(self) -> Counter[str]:
        with self._lock:
            errors, self.errors = self.errors, Counter()
        return errors

    def wait_calm(self) -> None:
        """Ready, and it is being answered again."""
        self._served.wait_ready(PATIENCE_S)
        good = self.good
        wait_for(lambda: self.good >= good + 2 * self.streams, PATIENCE_S, "the load is answered")

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


def run_one(served: Range, load: Load, name: str, amount: int = 0) -> None:
    """Carry one drill out. An out-of-memory that came alone is provoked once more: the alert is about the second.
    Raises AssertionError for whatever is not as the drill states it."""
    expected = DRILLS[name]
    load.wait_calm()
    load.take_errors()
    known, before = served.incidents(), served.metric(expected.metric)
    usual = {knob: served.snapshot("limits")["limits"][knob] for knob in expected.limits}
    if expected.limits:
        served.set_limits(**expected.limits)
    began = time.monotonic()
    served.drill(name, amount or AMOUNTS.get(name, 0))
    wait_for(
        lambda: served.metric(expected.metric) > before,
        PATIENCE_S,
        f"{name}: {expected.metric}\n{served.log[-3000:]}",
    )
    if expected.kind == "oom" and served.metric(expected.metric) < before + 2 and expected.victims == "none":
        served.drill(name, amount)
        wait_for(lambda: served.metric(expected.metric) > before + 1, PATIENCE_S, f"{name}: once more")
    if expected.kind:
        raised = served.since(known, expected.kind)
        assert {each["cause"] for each in raised} == {expected.cause}, (name, [each["summary"] for each in raised])
        wait_for(lambda: served.report(raised[0]), PATIENCE_S, f"{name}: a bundle")
        assert served.report(raised[0])["cause"] == expected.cause
    wait_for(lambda: served.first(began) == (expected.runbook, expected.section), PATIENCE_S,
             f"{name}: the doctor's first finding; it is {served.first(began)}")  # fmt: skip
    if name == "slow_client":
        time.sleep(PRESSED_S)  # an alert about a state needs one that lasts
    if name not in ENDS:
        served.drill("none")
    if usual:
        wait_for(lambda: served.metric(expected.metric) == 0, PATIENCE_S, "nobody waits any more")
        served.set_limits(**usual)
    if not expected.kind:  # what comes next must not be mixed up with it: it is in the last sample still
        place = (expected.runbook, expected.section)
        wait_for(lambda: served.first(time.monotonic()) != place, PATIENCE_S, f"{name}: over")
    _check_victims(served, load, name, expected, known)


def _check_victims(served: Range, load: Load, name: str, expected: Drill, known: dict[str, Any]) -> None:
    load.wait_calm()
    errors = load.take_errors()
    if expected.victims == "all":
        assert errors, name
        return
    assert not errors, (name, errors)
    new = [each for each in served.incidents().values() if each["incident_id"] not in known]
    if not expected.kind:
        assert not new, (name, new)
    if expected.victims == "one":
        assert {r[:6] for each in new for r in each["request_ids"]} == {"drill-"}, (name, new)
