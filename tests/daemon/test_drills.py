"""Each drill once, in random order, under load, on a tiny model: the cause is right every time, the bundle is there
without asking, and nobody's request ends by it but its victims'. And what explains a fault cannot know of the drill."""

import ast
import contextlib
import json
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.drills import DRILLS, Drill, armed
from engine.errors import ConfigError
from runbooks import check, gather
from runbooks.evidence import Targets
from telemetry import evidence
from telemetry.bundle import Folder
from telemetry.client import Client, ClientError, Endpoint
from tests.fakes.tiny import prepare_tiny, write_tiny
from tests.served import ROOT, Served, wait_for

PATIENCE_S = 120
DEADLINE_S = 4
STREAMS = 5
UNHURRIED = Targets(ttft_seconds=1e9, inter_token_seconds=1e9, loop_lag_seconds=1e9)
AMOUNTS = {"slow_client": 20_000, "full_disk": 3_000}  # ms that they last
ENDS = ("kill_engine", "wedge_for_good", "kill_both")


class Load:
    """A few clients that ask again and again; what goes wrong is counted."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.good = 0
        self.errors: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        time.sleep(0.13 * number)
        round_ = 0
        while not self._over.is_set():
            round_ += 1
            body = {
                "model": "tiny",
                "prompt": f"{number}{round_ % 97:02}ab",
                "max_tokens": 40,
                "temperature": 0,
                "ignore_eos": True,
            }
            try:
                status, answer = self._served.post("/v1/completions", body)
                code = "" if status == 200 else str(answer["error"].get("code"))
            except (OSError, ValueError) as error:
                status, code = 0, type(error).__name__
            with self._lock:
                self.good += status == 200
                if status != 200:
                    self.errors[f"{status} {code}"] += 1
            if status != 200:
                time.sleep(0.2)

    def take_errors(self) -> Counter[str]:
        with self._lock:
            errors, self.errors = self.errors, Counter()
        return errors

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """So shaped that a long prompt's activations, and the log-probabilities of a short one, are each larger than what a
    typical step takes: 12 x intermediate bytes a token against 4 x vocabulary a row."""
    directory = tmp_path_factory.mktemp("drills")
    model = write_tiny("llama", directory / "tiny", vocab_size=12288, intermediate_size=1024)
    prepare_tiny(directory / "tiny", model)
    served = Served(
        directory,
        str(directory / "tiny"),
        *("--drill", "all", "--drill", "collector_down", "--max-num-seqs", "16", "--memory-limit", "2GiB"),
        env={
            "INFERD_PROGRESS_DEADLINE": str(DEADLINE_S),
            "INFERD_API_KEY": "",
            "INFERD_SERVED_MODEL_NAME": "tiny",
            "INFERD_TUNER": "false",
        },
    )
    with served:
        yield served


def incidents(served: Served) -> dict[str, Any]:
    _, body = served.control("/inferd/v1/incidents")
    return {each["incident_id"]: each for each in json.loads(body)["incidents"]}


def drill(served: Served, name: str, amount: int = 0) -> None:
    status, body = served.control(f"/inferd/v1/drill/{name}", "POST", {"amount": amount})
    assert status == 200, body


def metric(served: Served, series: str) -> float:
    """The sum of the samples that `series` (a name, or one with labels) selects."""
    name, _, labels = series.partition("{")
    wanted = set(labels.rstrip("}").split(",")) - {""}
    total = 0.0
    for line in served.control("/metrics")[1].decode().splitlines():
        found = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+).*", line)
        if found and found[1] == name and wanted <= set((found[2] or "").split(",")):
            total += float(found[3])
    return total


def new_incidents(served: Served, known: dict[str, Any], kind: str) -> list[Any]:
    return [each for name, each in incidents(served).items() if name not in known and each["kind"] == kind]


def wait_calm(served: Served, load: Load) -> None:
    """Ready, and the load is being answered again."""
    served.wait_ready(PATIENCE_S)
    good = load.good
    wait_for(lambda: load.good >= good + 2 * STREAMS, PATIENCE_S, "the load is answered")


def run_one(served: Served, load: Load, name: str) -> None:
    expected = DRILLS[name]
    wait_calm(served, load)
    load.take_errors()
    known, before = incidents(served), metric(served, expected.metric)
    began = time.monotonic()
    drill(served, name, AMOUNTS.get(name, 0))
    if expected.kind:
        raised = wait_for(
            lambda: new_incidents(served, known, expected.kind),
            PATIENCE_S,
            f"{name}: an incident\n{served.log[-3000:]}",
        )
        assert {each["cause"] for each in raised} == {expected.cause}, (name, [each["summary"] for each in raised])
        wait_for(lambda: metric(served, expected.metric) > before, PATIENCE_S, f"{name}: {expected.metric}")
        wait_for(lambda: report(served, raised[0]), PATIENCE_S, f"{name}: a bundle")
        assert report(served, raised[0])["cause"] == expected.cause
    else:
        assert metric(served, expected.metric) >= 0
    wait_for(lambda: first(served, began) == (expected.runbook, expected.section), PATIENCE_S,
             f"{name}: the doctor's first finding; it is {first(served, began)}")  # fmt: skip
    if name not in ENDS:
        drill(served, "none")
    check_victims(served, load, name, expected, known)


def check_victims(served: Served, load: Load, name: str, expected: Drill, known: dict[str, Any]) -> None:
    wait_calm(served, load)
    errors = load.take_errors()
    if expected.victims == "all":
        assert errors, name
        return
    assert not errors, (name, errors)
    new = [each for each in incidents(served).values() if each["incident_id"] not in known]
    if not expected.kind:
        assert not new, name
    if expected.victims == "one":
        assert {r[:6] for each in new for r in each["request_ids"]} == {"drill-"}, (name, new)


def first(served: Served, since: float) -> tuple[str, str] | None:
    """Where the doctor's first finding leads, looking at nothing older than `since`. On a machine that runs other
    tests too, latencies are a finding of their own: none counts here."""
    try:
        evidence = gather.live(Client(Endpoint(socket=served.runtime / "control.sock")), UNHURRIED)
    except ClientError:
        return None
    found = check.examine(evidence.within(time.monotonic() - since))
    places = [(each.runbook, each.section) for each in found]
    collector = DRILLS["collector_down"]  # all the time here, beside whatever else is planted
    return next((place for place in places if place != (collector.runbook, collector.section)), None)


def report(served: Served, incident: Any) -> Any:
    _, body = served.control(f"/inferd/v1/incidents/{incident['incident_id']}")
    return json.loads(body)["report"]


@pytest.mark.timeout(900)
def test_each_drill_once_in_random_order_under_load(served: Served) -> None:  # cases 1, 2, 4, 5, 6, 24, 26, 33
    order = [name for name in DRILLS if name not in ("collector_down", "kill_both")]
    seed = int(os.environ.get("DRILL_SEED", random.randrange(10**6)))
    random.Random(seed).shuffle(order)
    order.remove("kill_engine")  # the heap stays in pieces: the next engine has a new one
    order.insert(order.index("fragmentation") + 1, "kill_engine")
    print("order by seed", seed, order)
    load = Load(served)
    try:
        finished = 0.0
        for name in order:
            began = time.monotonic()
            run_one(served, load, name)
            print(f"{name}: {time.monotonic() - began:.1f} s")
            total = metric(served, "inferd_requests_finished_total")
            assert total >= finished  # case 33: counters do not go back when an engine ends
            finished = total
    finally:
        load.stop()
    bundles = Folder(served.state / "incidents")
    for name in bundles.ids():
        text = bundles.file(name).read_text() + bundles.file(name).with_suffix(".md").read_text()
        assert "drill " not in text.replace("drill-", "")  # of the drill, its name or flag, nothing is known
    assert metric(served, DRILLS["collector_down"].metric) > 0  # all the time, and nobody noticed
    causes = {bundle.cause for name in bundles.ids() if (bundle := bundles.read(name)) is not None}
    assert causes >= {DRILLS[name].cause for name in order if DRILLS[name].kind}


@pytest.mark.timeout(300)
def test_both_killed_at_once_are_explained_by_the_next_life(served: Served) -> None:
    load = Load(served)
    wait_calm(served, load)
    with contextlib.suppress(OSError):  # it may not even get to answer
        served.control("/inferd/v1/drill/kill_both", "POST", {})
    assert served.process is not None
    assert served.process.wait(30) == -9
    load.stop()
    served.start()
    began = time.monotonic()
    found = wait_for(lambda: new_incidents(served, {}, "killed"), PATIENCE_S, "the incident of the previous life")
    planted = DRILLS["kill_both"]
    assert first(served, began - PATIENCE_S) == (planted.runbook, planted.section)
    bundle = wait_for(lambda: report(served, found[0]), PATIENCE_S, "its bundle")
    assert bundle["previous_life"]
    assert bundle["cause"] == "killed"
    assert bundle["end"]["process"] == "both"
    assert bundle["requests"]
    assert bundle["steps"]
    assert (served.state / "incidents" / f"{found[0]['incident_id']}.md").exists()
    served.stop()
    served.start()
    assert incidents(served) == {}  # once is enough, and this end was an orderly one


def test_the_table_names_what_exists() -> None:
    rules = "".join(path.read_text() for path in (ROOT / "telemetry/prometheus/rules").glob("*.yml"))
    golden = (ROOT / "tests/telemetry/golden_metrics.txt").read_text()
    books = {book.name: book.sections for book in check.shelf()}
    for name, each in DRILLS.items():
        assert each.section in books[each.runbook], name
        assert f"alert: {each.alert}\n" in rules, name
        assert each.metric.partition("{")[0].removesuffix("_total") in golden, name
    with pytest.raises(ConfigError, match="no such drill: nope"):
        armed(("nope",))
    oom = {each.cause for each in DRILLS.values() if each.kind == "oom"}
    # host_cgroup has fixtures in test_forensics and test_postmortem: a machine must not kill its own tests
    assert oom == set(evidence.OOM_CAUSES) - {"unknown", "host_cgroup"}


def test_forensics_never_receives_a_drills_name_or_flag() -> None:
    for module in ("telemetry/forensics.py", "telemetry/evidence.py", "telemetry/postmortem.py", "engine/autopsy.py"):
        tree = ast.parse((ROOT / module).read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        texts = {str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert not [word for word in names | texts if re.search(r"drill|planted|faults", word, re.IGNORECASE)], module
    fields = {f.name for kind in (evidence.MemoryFault, evidence.FailedStep, evidence.Reading, evidence.ProcessEnd)
              for f in msgspec.structs.fields(kind)}  # fmt: skip
    assert not [name for name in fields if "drill" in name or "fault" in name]


def test_without_the_flag_there_is_no_route(tmp_path: Path) -> None:
    assert armed(()) == ()
    assert "collector_down" in armed(("all",))
