"""Each drill once, in random order, under load, on a tiny model: the cause is right every time, the bundle is there
without asking, the alert fires and ends again by the rules that are shipped, and nobody's request ends by it but its
victims'. And what explains a fault cannot know of the drill."""

import ast
import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from daemon.drills import DRILLS, armed
from engine.errors import ConfigError
from runbooks import check
from telemetry import evidence
from telemetry.bundle import Folder
from tests.drilling import PATIENCE_S, Load, Range, run_one
from tests.fakes.tape import Tape
from tests.served import ROOT, wait_for

DEADLINE_S = 4
STREAMS = 5
SPAN_MINUTES = 10  # into which a drill is stretched, for the rules
SLOWER = {"slow_client": 6}  # so many times that, where an alert needs a state that lasts


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Range]:
    with Range(tmp_path_factory.mktemp("drills"), DEADLINE_S) as served:
        yield served


@pytest.fixture(scope="module")
def tape(served: Range, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tape]:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    alerts = {each.alert for each in DRILLS.values()}
    running = Tape(served.exposition, alerts, tmp_path_factory.mktemp("tape"))
    yield running
    running.stop()


@pytest.mark.timeout(900)
def test_each_drill_once_in_random_order_under_load(served: Range, tape: Tape) -> None:
    """Cases 1, 2, 4, 5, 6, 24, 26, 33."""
    order = [name for name in DRILLS if name not in ("collector_down", "kill_both")]
    seed = int(os.environ.get("DRILL_SEED", 11))
    random.Random(seed).shuffle(order)
    order.remove("kill_engine")  # the heap stays in pieces: the next engine has a new one
    order.insert(order.index("fragmentation") + 1, "kill_engine")
    print("order by seed", seed, order)
    load = Load(served, STREAMS)
    try:
        finished = 0.0
        for name in order:
            began, begun = time.monotonic(), tape.now()
            run_one(served, load, name)
            tape.play(DRILLS[name].alert, begun, SPAN_MINUTES * SLOWER.get(name, 1))
            print(f"{name}: {time.monotonic() - began:.1f} s")
            total = served.metric("inferd_requests_finished_total")
            assert total >= finished  # case 33: counters do not go back when an engine ends
            finished = total
    finally:
        load.stop()
    bundles = Folder(served.state / "incidents")
    for name in bundles.ids():
        text = bundles.file(name).read_text() + bundles.file(name).with_suffix(".md").read_text()
        assert "drill " not in text.replace("drill-", "")  # of the drill, its name or flag, nothing is known
    assert served.metric(DRILLS["collector_down"].metric) > 0  # all the time, and nobody noticed but the alert
    tape.play(DRILLS["collector_down"].alert, 0, 3 * SPAN_MINUTES)
    causes = {bundle.cause for name in bundles.ids() if (bundle := bundles.read(name)) is not None}
    assert causes >= {DRILLS[name].cause for name in order if DRILLS[name].kind}


@pytest.mark.timeout(300)
def test_log_probabilities_of_a_prompt_fail_alone_among_fifty_others(served: Range) -> None:
    """Case 1."""
    load = Load(served, 50)
    try:
        run_one(served, load, "logits")
    finally:
        load.stop()


@pytest.mark.timeout(300)
def test_both_killed_at_once_are_explained_by_the_next_life(served: Range, tape: Tape) -> None:
    load = Load(served, STREAMS)
    load.wait_calm()
    killed, begun = time.monotonic(), tape.now()
    served.kill_both()
    load.stop()
    time.sleep(2)  # nobody is there to start it
    served.start()
    planted = DRILLS["kill_both"]
    tape.play(planted.alert, begun, SPAN_MINUTES)
    found = wait_for(lambda: served.since({}, "killed"), PATIENCE_S, "the incident of the previous life")
    assert served.first(killed - 2) == (planted.runbook, planted.section)
    bundle = wait_for(lambda: served.report(found[0]), PATIENCE_S, "its bundle")
    assert bundle["previous_life"]
    assert bundle["cause"] == "killed"
    assert bundle["end"]["process"] == "both"
    assert bundle["requests"]
    assert bundle["steps"]
    assert (served.state / "incidents" / f"{found[0]['incident_id']}.md").exists()
    served.stop()
    served.start()
    assert served.incidents() == {}  # once is enough, and this end was an orderly one


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
