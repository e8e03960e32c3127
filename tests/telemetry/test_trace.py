"""Traces: the span tree of a record and of a start, its times and parents, what is exported, bad collectors."""

import logging
import socket
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from telemetry.bus import Bus, Undelivered
from telemetry.events import EngineStarted, Event, LimitsView, RequestRecord
from telemetry.otlp import metrics_from, traces_from
from telemetry.sampling import Head
from telemetry.trace import Traces

S = 1_000_000_000
WALL = 1_700_000_000 * S
TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "00f067aa0ba902b7"
PARENT = "b7ad6b7169203331"
LIMITS = LimitsView(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    prefill_chunk=64,
    max_partial_prefills=1,
    context_limit=512,
    kv_blocks=64,
    spec_depth=0,
)
STARTED = EngineStarted(
    at_ns=9 * S,
    engine_id="e",
    pid=7,
    restarts=1,
    phases={"boot": S, "weights": 2 * S, "total": 3 * S},
    resolved={"block_size": 16, "dtype": "float32", "why": None},
    reasons={},
    limits=LIMITS,
)


def record(**changes: Any) -> RequestRecord:
    facts: dict[str, Any] = {
        "at_ns": 14 * S,
        "request_id": "r-0",
        "group_id": "r",
        "index": 0,
        "model": "smollm2",
        "operation": "chat",
        "stream": True,
        "arrival_ns": 10 * S,
        "stages": {"queue": S, "prefill": S, "decode": 2 * S},
        "reason": "stop",
        "prompt_tokens": 20,
        "output_tokens": 5,
        "queued_ns": 10 * S,
        "scheduled_ns": 11 * S,
        "first_token_ns": 12 * S,
        "last_token_ns": 14 * S,
        "kv_blocks": 2,
        "kv_tail_slots": 8,
        "trace_id": TRACE,
        "span_id": SPAN,
        "trace_sampled": True,
    }
    return RequestRecord(**{**facts, **changes})


def exported(*events: Event, level: str = "request") -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    traces = Traces(exporter, "1", clock=lambda: 20 * S, wall_ns=lambda: WALL)
    traces.level = level
    traces.take(events)
    return list(exporter.get_finished_spans())


def tiles(root: ReadableSpan, children: Sequence[ReadableSpan]) -> list[tuple[str, int]]:
    """Name and length of each child; asserts that they are the root's and tile it without a gap."""
    assert root.context is not None
    at = root.start_time
    for child in children:
        assert child.parent is not None and child.context is not None
        assert (child.parent.trace_id, child.parent.span_id) == (root.context.trace_id, root.context.span_id)
        assert child.context.trace_id == root.context.trace_id
        assert child.start_time == at
        at = child.end_time
    assert at == root.end_time
    assert len({child.context.span_id for child in children if child.context}) == len(children)
    return [(c.name, (c.end_time or 0) - (c.start_time or 0)) for c in children]


def test_a_record_is_a_root_and_a_child_per_stage_that_tile_it() -> None:
    *children, root = exported(record())
    assert (root.name, root.kind, root.parent) == ("chat smollm2", SpanKind.SERVER, None)
    assert (root.start_time, root.end_time) == (WALL - 10 * S, WALL - 6 * S)
    assert root.context is not None
    assert (f"{root.context.trace_id:032x}", f"{root.context.span_id:016x}") == (TRACE, SPAN)
    assert tiles(root, children) == [
        ("inferd.stage.queue", S),
        ("inferd.stage.prefill", S),
        ("inferd.stage.decode", 2 * S),
    ]


PIECES = (
    ("queue", S, 0),
    ("prefill", S // 4, 16),
    ("prefill_wait", S, 0),
    ("prefill", S // 2, 16),
    ("prefill", S // 4, 3),
    ("decode", S, 0),
)
STAGES = {"admission": S, "queue": S, "prefill": S, "prefill_wait": S, "decode": S, "finish": S}


def test_in_detail_every_chunk_is_a_span_and_the_order_is_the_true_one() -> None:
    whole = record(stages=STAGES, at_ns=16 * S, pieces=PIECES)
    *children, root = exported(whole, level="detail")
    names = ["admission", "queue", "prefill", "prefill_wait", "prefill", "prefill", "decode", "finish"]
    assert [name for name, _ in tiles(root, children)] == [f"inferd.stage.{name}" for name in names]
    chunks = [child.attributes for child in children if child.name == "inferd.stage.prefill"]
    assert [dict(c or {}) for c in chunks] == [
        {"inferd.chunk.number": 1, "inferd.chunk.tokens": 16},
        {"inferd.chunk.number": 2, "inferd.chunk.tokens": 16},
        {"inferd.chunk.number": 3, "inferd.chunk.tokens": 3},
    ]
    *sums, root = exported(whole)
    assert tiles(root, sums) == [(f"inferd.stage.{name}", ns) for name, ns in STAGES.items()]


def test_pieces_that_contradict_the_stages_are_not_shown() -> None:
    *children, root = exported(record(pieces=(("queue", S, 0),)), level="detail")
    assert [ns for _, ns in tiles(root, children)] == [S, S, 2 * S]


def test_attributes_follow_the_conventions() -> None:
    attributes = exported(STARTED, record(reason="error", error="out_of_memory"))[-1].attributes
    assert attributes is not None
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.provider.name"] == "inferd"
    assert attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (20, 5)
    assert attributes["gen_ai.latency.time_to_first_token"] == 2.0
    assert attributes["gen_ai.latency.time_in_model_inference"] == 3.0
    assert attributes["error.type"] == "out_of_memory"
    assert attributes["inferd.kv.tail_waste_ratio"] == 0.25
    assert attributes["inferd.limits.kv_blocks"] == 64


def test_a_start_is_a_trace_of_its_own() -> None:
    *children, root = exported(STARTED)
    assert tiles(root, children) == [("inferd.start.boot", S), ("inferd.start.weights", 2 * S)]
    assert (root.name, root.parent, root.end_time) == ("inferd.start", None, WALL - 11 * S)
    assert root.attributes is not None
    assert root.attributes["inferd.engine.restarts"] == 1
    assert root.attributes["inferd.resolved.dtype"] == "float32"


def test_a_callers_span_is_the_parent() -> None:
    root = exported(record(parent_span_id=PARENT))[-1]
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT
    assert root.parent.is_remote


def test_a_callers_tracestate_is_passed_on_in_every_span() -> None:
    *children, root = exported(record(parent_span_id="00f067aa0ba902b7", trace_state="congo=t61rcWkgMzE,rojo=1"))
    for span in (*children, root):
        assert span.context is not None
        assert span.context.trace_state.to_header() == "congo=t61rcWkgMzE,rojo=1"
    (plain, *_) = exported(record(trace_state="no member"))
    assert plain.context is not None
    assert plain.context.trace_state.to_header() == "", "what is malformed is dropped"


def test_a_request_that_never_ran_is_exported_too() -> None:
    (only,) = exported(
        record(stages={}, at_ns=10 * S, reason="shed", output_tokens=0, scheduled_ns=0, first_token_ns=0, kv_blocks=0)
    )
    assert only.attributes is not None
    assert only.attributes["error.type"] == "shed"
    assert "gen_ai.latency.time_to_first_token" not in only.attributes
    assert only.status.status_code is StatusCode.UNSET


def test_faults_and_slow_ones_are_always_exported() -> None:
    assert exported(record(trace_sampled=False)) == []
    assert exported(record(trace_sampled=False, reason="error"))[-1].status.status_code is StatusCode.ERROR
    assert exported(record(trace_sampled=False, at_ns=50 * S)) != []


def test_off_is_off() -> None:
    assert exported(STARTED, record(), record(reason="error"), level="off") == []


@pytest.mark.parametrize(
    ("sampler", "alone", "kept", "dropped"),
    [
        ("", True, True, False),
        ("always_on", True, True, True),
        ("always_off", False, False, False),
        ("parentbased_always_off", False, True, False),
        ("no such sampler", True, True, False),
    ],
)
def test_the_head_decides_as_the_standard_says(sampler: str, alone: bool, kept: bool, dropped: bool) -> None:
    head = Head.from_environ({"OTEL_TRACES_SAMPLER": sampler})
    assert [head.decide(TRACE, parent) for parent in (None, True, False)] == [alone, kept, dropped]


def test_a_ratio_keeps_that_share_by_trace_id_alone() -> None:
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    head = Head.from_environ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"})
    ids = [f"{number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128):032x}" for number in range(1, 2001)]
    kept = [trace_id for trace_id in ids if head.decide(trace_id, None)]
    assert 400 < len(kept) < 600
    theirs = TraceIdRatioBased(0.25)
    assert kept == [i for i in ids if theirs.should_sample(None, int(i, 16), "").decision.is_sampled()]
    assert Head.from_environ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "x"}).ratio == 1.0


class Refusing(SpanExporter):
    """A collector that takes nothing."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE


def test_what_the_collector_does_not_take_is_counted() -> None:
    traces = Traces(Refusing(), "1")
    with pytest.raises(Undelivered) as caught:
        traces.take([record(), record(), record(trace_sampled=False)])
    assert caught.value.count == 2
    bus = Bus(None, {"trace": traces.take}, wants={"trace": traces.wants})
    bus.publish(record())
    assert bus.flush()
    assert bus.dropped() == {"trace": 1}
    bus.close()


HERE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.mark.parametrize("make", [traces_from, metrics_from])
def test_nothing_is_sent_unless_an_endpoint_is_set(make: Any) -> None:
    assert make("1", {}) is None
    assert make("1", {**HERE, "OTEL_SDK_DISABLED": "true"}) is None
    assert make("1", {**HERE, "OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}) is None


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**HERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTLP over http/json is not served"),
        ({**HERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "pip install 'inferd[grpc]'"),
    ],
)
def test_a_missing_part_is_said_in_a_line_and_nothing_else_happens(
    environ: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.metric_exporter", None)
    with caplog.at_level(logging.ERROR):
        assert traces_from("1", environ) is None
        assert metrics_from("1", environ) is None
    assert caplog.text.count(said) == 2
    assert "Traceback" not in caplog.text


def test_a_collector_that_is_not_there_costs_only_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
        traces = traces_from("1")
        assert traces is not None
        with pytest.raises(Undelivered):
            traces.take([record()])
        traces.close()
