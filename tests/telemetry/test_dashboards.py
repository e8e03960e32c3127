"""The Grafana dashboard: up to date, complete, and about metrics that exist."""

import ast
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from telemetry.events import RequestRecord
from telemetry.exposition import rows
from telemetry.grafana.build import JSON_FILE, build
from telemetry.semconv import request_attributes
from tests.fakes import promql

FOLDER = JSON_FILE.parent
KNOWN = promql.series(rows())
BOARD: dict[str, Any] = json.loads(JSON_FILE.read_text())
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str, str]]:
    """(panel, PromQL, legend) of every query, the annotation's and the variables' included."""
    for panel in PANELS:
        for target in panel["targets"]:
            if "expr" in target:
                yield panel["title"], target["expr"], target["legendFormat"]
    for note in BOARD["annotations"]["list"]:
        yield note["name"], note["expr"], ""
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
            assert asked, variable["query"]
            yield variable["name"], f"count by ({asked[2]}) ({asked[1]})", ""


def concrete(expression: str) -> str:
    """As Grafana sends it: variables replaced."""
    return re.sub(r"\$(model|instance)", ".*", expression).replace("$__rate_interval", "1m")


EXPRESSIONS = list(expressions())


def test_the_committed_json_is_what_the_code_builds() -> None:
    assert JSON_FILE.read_text() == build(), "run: python -m telemetry.grafana.build"


def test_building_twice_gives_the_same() -> None:
    assert build() == build()


@pytest.mark.parametrize(("panel", "expression", "legend"), EXPRESSIONS, ids=[f"{e[0]}-{e[2]}" for e in EXPRESSIONS])
def test_a_query_names_what_is_exposed(panel: str, expression: str, legend: str) -> None:
    assert promql.faults(concrete(expression), KNOWN) == []
    grouped = promql.read(concrete(expression)).grouping
    assert {label for label in re.findall(r"{{(\w+)}}", legend) if label not in grouped} == set(), "legend"


def test_every_query_is_valid_promql(tmp_path: Path) -> None:
    """promtool's parser takes them all, as the expressions of recording rules."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    recorded = [{"record": f"q:{i}", "expr": concrete(e)} for i, (_, e, _) in enumerate(EXPRESSIONS)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": recorded}]}))
    done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"{len(EXPRESSIONS)} rules found" in done.stdout


def test_queries_stay_within_the_chosen_instances() -> None:
    """Two daemons on one Prometheus are not mixed up; alerts are told apart by their labels."""
    for panel, expression, _ in EXPRESSIONS:
        for selector in promql.read(expression).selectors:
            free = selector.name == "ALERTS" or panel in ("model", "instance")
            assert free or selector.matchers.get("instance") == "$instance", (panel, expression)


def test_the_rows_answer_the_questions_of_an_engineer_on_call() -> None:
    titles = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert titles == [
        "Overview",
        "Latency: where the time went",
        "Memory: who has the bytes",
        "KV cache",
        "Tuner and device",
        "Incidents",
        "Traces",
    ]


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_a_panel_says_what_to_conclude(panel: dict[str, Any]) -> None:
    """A title, a sentence, at least one query, and a data source that a variable chooses."""
    assert panel["title"] and panel["description"].endswith((".", ":"))
    assert panel["targets"]
    kind = panel["datasource"]["type"]
    assert panel["datasource"]["uid"] == {"prometheus": "${prometheus}", "tempo": "${tempo}"}[kind]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_panels_lie_side_by_side() -> None:
    """No two cover each other, and none sticks out of the grid of 24."""
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, (panel["title"], taken[x, y])
                taken[x, y] = panel["title"]


def test_stacks_are_partitions_and_their_limit_is_no_part_of_them() -> None:
    ladder = next(panel for panel in PANELS if panel["title"] == "Memory by owner")
    assert ladder["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    limit = next(o for o in ladder["fieldConfig"]["overrides"] if o["matcher"]["options"] == "limit")
    assert {"id": "custom.stacking", "value": {"mode": "none"}} in limit["properties"]
    stacked = [p for p in PANELS if '"mode": "normal"' in json.dumps(p.get("fieldConfig", {}))]
    assert ladder in stacked
    for panel in stacked:
        assert not any("quantile" in target["expr"] for target in panel["targets"]), "percentiles do not add up"


def test_latencies_lead_to_traces() -> None:
    """Queries with exemplars, a data source that links them, and a panel that opens the trace."""
    linked = {t["expr"] for p in PANELS for t in p["targets"] if t.get("exemplar")}
    for histogram in ("inferd_time_to_first_token_seconds", "inferd_request_seconds"):
        assert any(f"{histogram}_bucket" in expression for expression in linked)
    sources = yaml.safe_load((FOLDER / "provisioning/datasources/inferd.yml").read_text())["datasources"]
    by_type = {source["type"]: source for source in sources}
    [link] = by_type["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert link["name"] == "trace_id"
    assert link["datasourceUid"] == by_type["tempo"]["uid"]
    back = by_type["tempo"]["jsonData"]["tracesToMetrics"]
    assert back["datasourceUid"] == by_type["prometheus"]["uid"]
    for query in back["queries"]:
        selector = query["query"].replace("$$__tags", 'model="m"')
        assert promql.faults(selector, KNOWN) == []
    assert {t["query"] for p in PANELS for t in p["targets"] if p["type"] == "traces"} == {"$trace_id"}


def test_traces_are_found_by_attributes_that_their_spans_have() -> None:
    record = RequestRecord(
        at_ns=1, request_id="r", group_id="r", index=0, model="m", operation="chat", stream=False, arrival_ns=0,
        stages={"queue": 1}, reason="stop",
    )  # fmt: skip
    attributes = request_attributes(record)
    [search] = [t["query"] for p in PANELS for t in p["targets"] if "gen_ai" in t.get("query", "")]
    named = re.findall(r'span\.([\w.]+) = "(\w+)"', search)
    assert named and all(attributes[attribute] == value for attribute, value in named)
    sources = yaml.safe_load((FOLDER / "provisioning/datasources/inferd.yml").read_text())["datasources"]
    for tag in next(s for s in sources if s["type"] == "tempo")["jsonData"]["tracesToMetrics"]["tags"]:
        assert tag["key"] in attributes
        assert tag["value"] in KNOWN["inferd_requests"]


def test_the_state_is_that_of_now() -> None:
    """Not the last one within the chosen range: a daemon that was starting an hour ago is not starting."""
    [state] = [target for panel in PANELS if panel["title"] == "State" for target in panel["targets"]]
    assert (state["instant"], state["range"]) == (True, False)


def test_panels_can_be_linked_to() -> None:
    assert [panel["id"] for panel in BOARD["panels"]] == list(range(1, len(BOARD["panels"]) + 1))


def test_the_provider_offers_the_dashboard() -> None:
    [provider] = yaml.safe_load((FOLDER / "provisioning/dashboards/inferd.yml").read_text())["providers"]
    assert provider["type"] == "file"
    assert Path(provider["options"]["path"]).name == "inferd"


def test_only_the_builder_needs_the_sdk(repo: Path) -> None:
    """Nothing that serves imports the SDK or the builder: the base install has neither."""
    for path in repo.glob("*/**/*.py"):
        if FOLDER in path.parents or "tests" in path.parts or any(part.startswith(".") for part in path.parts):
            continue
        imported = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        }
        assert not {n for n in imported if n.startswith(("grafana_foundation_sdk", "telemetry.grafana"))}, path
