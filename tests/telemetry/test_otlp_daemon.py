"""A running daemon sends OTLP to a receiver made of the official service definitions, which then holds whole trees.

Whole means: a root per choice, whatever became of it, and children that tile it from its arrival to its last byte; also
when the engine is killed, when the client leaves, and when the daemon ends first.
"""

import http.client
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from telemetry.genai import DURATION_SECONDS, PER_TOKEN_SECONDS, TTFT_SECONDS
from tests.fakes.collector import Collector, Tree, attributes_of
from tests.served import Served, wait_for

PATIENCE_S = 60.0
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
SERVER, ERROR = 2, 2  # of the protobuf enums SpanKind and StatusCode
STEP_TOKENS = 64
COUNT = re.compile(r"_(total|count|sum|bucket)\{")
LONG = {"model": "tiny", "prompt": "x", "max_tokens": 3500, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.fakes.tiny import write_tiny

    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny("llama", directory, max_position_embeddings=4096)
    return directory


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


def daemon(tmp_path: Path, model: Path, collector: Collector, protocol: str, *args: str) -> Served:
    flags = ("--served-model-name", "tiny", "--max-num-batched-tokens", str(STEP_TOKENS), "--log-format", "json")
    environ = {**collector.environ(protocol), "CACHE_DIRECTORY": str(tmp_path / "cache")}
    return Served(tmp_path, str(model), *flags, *args, env=environ)


def the_tree(collector: Collector, **wanted: Any) -> Tree:
    """The one tree whose root has these attributes, once it is there; it must be whole."""

    def found() -> list[Tree]:
        return [
            tree
            for tree in collector.trees()
            if all(tree.root.attributes.get(name.replace("__", ".")) == value for name, value in wanted.items())
        ]

    trees: list[Tree] = wait_for(found, PATIENCE_S, f"a trace with {wanted}")
    (tree,) = trees
    whole(tree)
    return tree


def whole(tree: Tree) -> None:
    """The children tile their root, are of its trace, and all are of one service."""
    at_ns = tree.root.begin_ns
    for child in tree.children:
        assert (child.trace_id, child.parent_id) == (tree.root.trace_id, tree.root.span_id)
        assert child.begin_ns == at_ns, f"{child.name} leaves a gap or overlaps"
        at_ns = child.end_ns
    assert at_ns == tree.root.end_ns
    assert tree.root.resource["service.name"] == "inferd"


def begin(served: Served, body: dict[str, Any], request_id: str) -> http.client.HTTPResponse:
    """A stream whose first bytes are there."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
    headers = {"content-type": "application/json", "x-request-id": request_id}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return response


def figures(served: Served) -> dict[str, float]:
    """Every series of a scrape."""
    lines = served.get("/metrics")[1].decode().splitlines()
    return {name: float(value) for name, _, value in (li.rpartition(" ") for li in lines if not li.startswith("#"))}


def stages(tree: Tree) -> list[str]:
    return [name.removeprefix("inferd.stage.") for name in tree.names]


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_request_of_many_chunks_in_detail(tmp_path: Path, model: Path, collector: Collector, protocol: str) -> None:
    with daemon(tmp_path, model, collector, protocol) as served:
        status, answer = served.control("/inferd/v1/trace-level", "POST", {"level": "detail"})
        assert (status, json.loads(answer)) == (200, {"level": "detail", "before": "request"})
        assert served.control("/inferd/v1/trace-level", "POST", {"level": "all"})[0] == 400

        prompt_tokens = 3 * STEP_TOKENS + 10
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
        body = {"model": "tiny", "prompt": "a" * prompt_tokens, "max_tokens": 9, "ignore_eos": True, "top_k": 5}
        headers = {
            "traceparent": f"00-{TRACE}-{CALLER}-01",
            "x-request-id": "chunks",
            "content-type": "application/json",
        }
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        assert (response.status, len(response.read()) > 0) == (200, True)
        told = response.headers["traceresponse"]

        tree = the_tree(collector, inferd__request__id="chunks")
        root = tree.root
        assert (root.name, root.kind, root.status) == ("text_completion tiny", SERVER, 0)
        assert (root.trace_id, root.parent_id) == (TRACE, CALLER)
        assert told == f"00-{TRACE}-{root.span_id}-01"
        assert stages(tree)[0] == "admission" and stages(tree)[-1] == "finish"
        chunks = [child.attributes for child in tree.children if "inferd.chunk.tokens" in child.attributes]
        assert [c["inferd.chunk.tokens"] for c in chunks] == [STEP_TOKENS] * 3 + [10]
        assert [c["inferd.chunk.number"] for c in chunks] == [1, 2, 3, 4]
        assert stages(tree).count("prefill") == 4 and stages(tree).count("decode") == 1
        expected = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "inferd",
            "gen_ai.request.model": "tiny",
            "gen_ai.request.max_tokens": 9,
            "gen_ai.request.top_k": 5,
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": 9,
            "http.response.status_code": 200,
            "inferd.prefill.chunks": 4,
            "inferd.limits.max_num_batched_tokens": STEP_TOKENS,
        }
        assert {name: root.attributes.get(name) for name in expected} == expected
        assert 0 < root.attributes["gen_ai.latency.time_to_first_token"] <= root.attributes["gen_ai.latency.e2e"]

        start = the_tree(collector, inferd__engine__restarts=0)
        names = ["boot", "plan", "weights", "pool", "warm_up", "engine"]
        assert start.names == [f"inferd.start.{name}" for name in names]
        assert start.root.trace_id != TRACE and start.root.end_ns <= root.begin_ns

        [line] = [e for e in map(as_json, served.log.splitlines()) if e.get("request_id") == "chunks"]
        assert (line["trace_id"], line["span_id"]) == (TRACE, root.span_id)

        for name, bounds in (
            ("gen_ai.server.request.duration", DURATION_SECONDS),
            ("gen_ai.server.time_to_first_token", TTFT_SECONDS),
            ("gen_ai.server.time_per_output_token", PER_TOKEN_SECONDS),
        ):
            [point] = wait_for(lambda name=name: collector.metric(name), PATIENCE_S, name)
            assert (point.count, tuple(point.explicit_bounds)) == (1, bounds)
            assert attributes_of(point) == {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": "inferd",
                "gen_ai.request.model": "tiny",
                "gen_ai.response.model": "tiny",
            }


def test_whole_trees_whatever_becomes_of_a_request(tmp_path: Path, model: Path, collector: Collector) -> None:
    """Several choices, refused, left by its client, its engine killed, and cut off by the daemon's end."""
    with daemon(tmp_path, model, collector, "grpc", "--grace", "0.5") as served:
        assert served.post("/v1/completions", {"model": "tiny", "prompt": "x", "n": 3, "max_tokens": 4})[0] == 200
        assert served.post("/v1/completions", {"model": "no such", "prompt": "x"})[0] == 404

        leaving = begin(served, LONG, "left")
        leaving.close()
        left = the_tree(collector, inferd__request__id="left")
        assert left.root.attributes["error.type"] == "client_disconnected"
        assert "decode" in stages(left)

        dying = [begin(served, LONG, f"dying-{number}") for number in range(2)]
        before = figures(served)
        os.kill(served.engine_pid(), signal.SIGKILL)
        for number, response in enumerate(dying):
            assert b"error" in response.read()
            dead = the_tree(collector, inferd__request__id=f"dying-{number}")
            assert (dead.root.status, dead.root.attributes["gen_ai.response.finish_reasons"]) == (ERROR, ["error"])
            assert dead.root.attributes["gen_ai.usage.output_tokens"] > 0
        assert the_tree(collector, inferd__engine__restarts=1).names[0] == "inferd.start.boot"
        wait_for(served.ready, PATIENCE_S, "ready again")
        after = figures(served)
        assert [name for name, value in before.items() if COUNT.search(name) and after[name] < value] == []
        assert [name for name, value in after.items() if name.startswith("inferd_requests{") and value] == []
        assert served.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 4})[0] == 200

        cut_off = begin(served, LONG, "cut-off")
        reader = threading.Thread(target=cut_off.read)
        reader.start()
        assert served.stop() == 0
        reader.join(PATIENCE_S)

    assert the_tree(collector, inferd__request__id="cut-off").root.attributes["error.type"] == "aborted"
    trees = collector.trees("text_completion tiny")
    for tree in trees:
        whole(tree)
    codes = [tree.root.attributes.get("error.type", "served") for tree in trees]
    assert sorted(codes) == sorted(
        ["served"] * 4 + ["model_not_found", "client_disconnected", "engine_died", "engine_died", "aborted"]
    )
    assert all(name.startswith("inferd.stage.") for tree in trees for name in tree.names)


def as_json(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
