"""Traces: the span tree of a record, its times and parents, what is sampled, and collectors that misbehave."""

import socket
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from opentelemetry.trace import SpanKind, StatusCode

from telemetry.bus import Bus, Undelivered
from telemetry.events import RequestRecord
from telemetry.otlp import traces_from
from telemetry.trace import Traces

S = 1_000_000_000
WALL = 1_700_000_000 * S
TRACE = "0af7651916cd43dd8448eb211c80319c"


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
        "trace_id": TRACE,
    }
    return RequestRecord(**{**facts, **changes})


def exported(*records: RequestRecord, sampler: Sampler = ALWAYS_ON) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    Traces(exporter, "1", sampler=sampler, clock=lambda: 20 * S, wall_ns=lambda: WALL).take(records)
    return list(exporter.get_finished_spans())


def test_a_record_is_a_root_and_a_child_per_stage_that_tile_it() -> None:
    *children, root = exported(record())
    assert (root.name, root.kind, root.parent) == ("chat smollm2", SpanKind.SERVER, None)
    assert (root.start_time, root.end_time) == (WALL - 10 * S, WALL - 6 * S)
    assert [child.name for child in children] == ["inferd.stage.queue", "inferd.stage.prefill", "inferd.stage.decode"]
    edges = [root.start_time, *(child.end_time for child in children)]
    assert edges[:-1] == [child.start_time for child in children]
    assert edges[-1] == root.end_time
    assert root.context is not None
    assert f"{root.context.trace_id:032x}" == TRACE
    for child in children:
        assert child.parent is not None
        assert child.parent.span_id == root.context.span_id


def test_attributes_follow_the_conventions() -> None:
    attributes = exported(record(reason="error", error="out_of_memory"))[-1].attributes
    assert attributes is not None
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.provider.name"] == "inferd"
    assert attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (20, 5)
    assert attributes["gen_ai.latency.time_to_first_token"] == 2.0
    assert attributes["gen_ai.latency.time_in_model_inference"] == 3.0
    assert attributes["error.type"] == "out_of_memory"


def test_a_callers_span_is_the_parent() -> None:
    root = exported(record(parent_span_id="b7ad6b7169203331", trace_sampled=True))[-1]
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    assert root.parent.is_remote


def test_a_request_that_never_ran_is_exported_too() -> None:
    (only,) = exported(
        record(stages={}, at_ns=10 * S, reason="shed", output_tokens=0, scheduled_ns=0, first_token_ns=0, trace_id="")
    )
    assert only.attributes is not None
    assert only.attributes["error.type"] == "shed"
    assert "gen_ai.latency.time_to_first_token" not in only.attributes
    assert only.status.status_code is StatusCode.UNSET


def test_faults_and_slow_ones_are_always_exported() -> None:
    quiet = ParentBased(ALWAYS_OFF)
    assert exported(record(), sampler=quiet) == []
    assert exported(record(parent_span_id="b7ad6b7169203331", trace_sampled=True), sampler=quiet) != []
    assert exported(record(reason="error"), sampler=quiet)[-1].status.status_code is StatusCode.ERROR
    assert exported(record(at_ns=50 * S), sampler=quiet) != []


def test_off_is_off() -> None:
    exporter = InMemorySpanExporter()
    traces = Traces(exporter, "1", sampler=ALWAYS_ON)
    traces.level = "off"
    traces.take([record()])
    assert exporter.get_finished_spans() == ()


class Refusing(SpanExporter):
    """A collector that takes nothing."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE


def test_what_the_collector_does_not_take_is_counted() -> None:
    traces = Traces(Refusing(), "1", sampler=ALWAYS_ON)
    with pytest.raises(Undelivered) as caught:
        traces.take([record(), record()])
    assert caught.value.count == 2
    bus = Bus(None, {"trace": traces.take})
    bus.publish(record())
    assert bus.flush()
    assert bus.dropped() == {"trace": 1}
    bus.close()


def test_nothing_is_sent_unless_an_endpoint_is_set() -> None:
    assert traces_from("1", {}) is None
    here = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert traces_from("1", {**here, "OTEL_SDK_DISABLED": "true"}) is None
    assert traces_from("1", {**here, "OTEL_TRACES_EXPORTER": "none"}) is None


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
