"""Traces: each request record becomes a span tree with explicit timestamps.

Owns which records become spans, and their shape. It must not time anything itself: a span says what the record says.
Enter at `Traces.take`, a sink of the bus (telemetry/otlp.py makes one if an endpoint is set). It exports on its own
thread, so a collector that is down, slow or wrong fills that sink's queue, whose losses are counted, and nothing else.

A record has the length of each stage, not its pieces: a stage's span is its sum, and the spans lie one after the other
in the timeline's order. Prefill, prefill_wait and preempted really interleave.
"""

import random
import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace.span import TraceState
from opentelemetry.util.types import Attributes

from telemetry.bus import Undelivered
from telemetry.events import STAGES, Event, RequestRecord
from telemetry.semconv import PROVIDER, STAGE_SPAN, request_attributes

LEVELS = ("off", "request", "detail")
FAULTS = ("error", "deadline")  # of these the server is the cause; the others are the client's or the limits' doing
PACE_SECONDS = 1.0  # how long the bus should gather records before an export


class Traces:
    """Turns records into spans and hands them to `exporter`. One thread."""

    def __init__(
        self,
        exporter: SpanExporter,
        version: str,
        *,
        sampler: Sampler | None = None,
        slow_seconds: float = 30.0,
        clock: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`sampler` decides at the head; None = OTEL_TRACES_SAMPLER. Faults and requests slower than
        `slow_seconds` are always exported."""
        self.level = "request"
        self._exporter = exporter
        self._slow_ns = round(slow_seconds * 1e9)
        self._clock = clock
        self._wall_ns = wall_ns
        self._ids = _Ids()
        self._finished = _Finished()
        resource = Resource.create({"service.name": PROVIDER, "service.version": version})
        provider = TracerProvider(sampler=sampler, resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._always = _Always(provider.sampler)
        provider.sampler = self._always
        provider.add_span_processor(self._finished)
        self._tracer = provider.get_tracer(PROVIDER, version)

    def take(self, batch: Sequence[Event]) -> None:
        """Export the records of the batch. Raises Undelivered if the exporter does not take them."""
        records = [event for event in batch if isinstance(event, RequestRecord)]
        if self.level == "off" or not records:
            return
        offset_ns = self._wall_ns() - self._clock()
        for record in records:
            self._span(record, offset_ns)
        spans = self._finished.collect()
        if spans and self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise Undelivered(len(records), "the trace collector did not take the spans")

    def close(self) -> None:
        self._exporter.shutdown()

    def _span(self, record: RequestRecord, offset_ns: int) -> None:
        self._always.on = record.reason in FAULTS or record.at_ns - record.arrival_ns >= self._slow_ns
        self._ids.next_trace = int(record.trace_id, 16) if record.trace_id else 0
        root = self._tracer.start_span(
            f"{record.operation} {record.model}",
            context=_parent(record),
            kind=SpanKind.SERVER,
            attributes=request_attributes(record),
            start_time=record.arrival_ns + offset_ns,
        )
        inside = set_span_in_context(root)
        at_ns = record.arrival_ns + offset_ns
        for stage in STAGES:
            spent_ns = record.stages.get(stage, 0)
            if spent_ns:
                child = self._tracer.start_span(STAGE_SPAN.format(stage=stage), context=inside, start_time=at_ns)
                at_ns += spent_ns
                child.end(at_ns)
        if record.reason in FAULTS:
            root.set_status(Status(StatusCode.ERROR, record.error or record.reason))
        root.end(record.at_ns + offset_ns)


def _parent(record: RequestRecord) -> Context:
    """The caller's span, if it sent one; else nothing, and the record's own trace id is used."""
    if not record.trace_id or not record.parent_span_id:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if record.trace_sampled else TraceFlags.DEFAULT)
    remote = SpanContext(int(record.trace_id, 16), int(record.parent_span_id, 16), is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(remote), Context())


class _Ids(IdGenerator):
    """Random ids, except that a trace whose id is known already keeps it: exemplars and logs have it."""

    def __init__(self) -> None:
        self.next_trace = 0
        self._random = random.SystemRandom()

    def generate_trace_id(self) -> int:
        return self.next_trace or self._random.getrandbits(128) or 1

    def generate_span_id(self) -> int:
        return self._random.getrandbits(64) or 1


class _Always(Sampler):
    """`inner`, but while `on` everything is sampled."""

    def __init__(self, inner: Sampler) -> None:
        self.on = False
        self._inner = inner

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        if self.on:
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)
        return self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return f"faults, slow ones, and {self._inner.get_description()}"


class _Finished(SpanProcessor):
    """Collects the spans that ended."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def collect(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans
