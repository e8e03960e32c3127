"""Span trees: what a finished choice and a started engine look like as OpenTelemetry spans.

Owns names, parents and times of spans; their attributes are telemetry/semconv.py's. It must not decide what is exported
or where to (telemetry/trace.py), nor time anything itself: a span says what the event says. The spans are made whole,
without a tracer, because they begin and end in the past. Enter at `Tree.request` and `Tree.start`.

A choice's children tile its root. As sums they lie one after the other in the timeline's order; in detail the engine's
stages are the pieces that really passed, each prefill chunk a span.
"""

import random
from collections.abc import Iterator, Mapping, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from telemetry.events import STAGES, Decision, EngineStarted, LimitsView, RequestRecord
from telemetry.semconv import (
    CHUNK,
    CHUNK_TOKENS,
    DECISION,
    FAULTS,
    PROVIDER,
    STAGE_SPAN,
    START_PHASE_SPAN,
    START_SPAN,
    Attributes,
    decision_attributes,
    request_attributes,
    start_attributes,
)

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_PIECEWISE = ("queue", "prefill", "prefill_wait", "decode", "preempted")  # the engine's stages
_Part = tuple[str, int, Mapping[str, str | int | float | bool | tuple[str, ...]]]  # name, ns, attributes


class Tree:
    """Makes spans of inferd `version`. `offset_ns` of the methods: Unix minus monotonic time."""

    def __init__(self, version: str, resource: Resource | None = None) -> None:
        self._resource = resource or Resource.create({"service.name": PROVIDER, "service.version": version})
        self._scope = InstrumentationScope(PROVIDER, version)
        self._random = random.Random()

    def request(
        self,
        record: RequestRecord,
        offset_ns: int,
        *,
        detail: bool = False,
        limits: LimitsView | None = None,
        block_size: int = 0,
        decisions: Sequence[Decision] = (),
    ) -> list[ReadableSpan]:
        """The children and then the root of a choice. `limits` and `block_size`: of the engine that served it. Those of
        the tuner's `decisions` that were made meanwhile are events of the root."""
        trace_id = int(record.trace_id, 16) if record.trace_id else self._random.getrandbits(128) or 1
        state = TraceState.from_header([record.trace_state]) if record.trace_state else None
        root = self._context(trace_id, int(record.span_id, 16) if record.span_id else 0, state)
        parent = None
        if record.trace_id and record.parent_span_id:
            parent = SpanContext(trace_id, int(record.parent_span_id, 16), is_remote=True, trace_flags=_SAMPLED)
        begin_ns = record.arrival_ns + offset_ns
        parts = _pieces(record) if detail else _sums(record)
        spans = list(self._tiles(parts, root, begin_ns))
        fault = record.reason in FAULTS
        spans.append(
            self._span(
                f"{record.operation} {record.model}",
                root,
                parent,
                begin_ns,
                record.at_ns + offset_ns,
                request_attributes(record, limits, block_size),
                kind=SpanKind.SERVER,
                events=[
                    SpanEvent(DECISION, decision_attributes(one), one.at_ns + offset_ns)
                    for one in decisions
                    if record.arrival_ns <= one.at_ns <= record.at_ns
                ],
                status=Status(StatusCode.ERROR, record.error or record.reason) if fault else Status(),
            )
        )
        return spans

    def start(self, event: EngineStarted, offset_ns: int) -> list[ReadableSpan]:
        """A trace of its own: from the engine's first instruction to its readiness, a child a phase."""
        phases = dict(event.phases)
        total_ns = phases.pop("total", 0) or sum(phases.values())
        root = self._context(self._random.getrandbits(128) or 1)
        end_ns = event.at_ns + offset_ns
        begin_ns = end_ns - total_ns
        parts: list[_Part] = [(START_PHASE_SPAN.format(phase=name), ns, {}) for name, ns in phases.items()]
        return [
            *self._tiles(parts, root, begin_ns),
            self._span(START_SPAN, root, None, begin_ns, end_ns, start_attributes(event)),
        ]

    def _tiles(self, parts: list[_Part], root: SpanContext, at_ns: int) -> Iterator[ReadableSpan]:
        for name, length_ns, attributes in parts:
            yield self._span(
                name, self._context(root.trace_id, state=root.trace_state), root, at_ns, at_ns + length_ns, attributes
            )
            at_ns += length_ns

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        begin_ns: int,
        end_ns: int,
        attributes: Attributes | Mapping[str, str | int | float | bool | tuple[str, ...]],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status | None = None,
        events: Sequence[SpanEvent] = (),
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            kind=kind,
            status=status or Status(),
            events=events,
            start_time=begin_ns,
            end_time=end_ns,
            instrumentation_scope=self._scope,
        )

    def _context(self, trace_id: int, span_id: int = 0, state: TraceState | None = None) -> SpanContext:
        span_id = span_id or self._random.getrandbits(64) or 1
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED, trace_state=state)


def _sums(record: RequestRecord) -> list[_Part]:
    """Each stage once."""
    return [(STAGE_SPAN.format(stage=stage), record.stages[stage], {}) for stage in STAGES if record.stages.get(stage)]


def _pieces(record: RequestRecord) -> list[_Part]:
    """The engine's stages as they passed; their sums where the pieces are not known, or say something else."""
    stages = record.stages
    if sum(ns for _, ns, _ in record.pieces) != sum(stages.get(stage, 0) for stage in _PIECEWISE):
        return _sums(record)
    before, after = ("admission", "tokenize", "wire_in"), ("wire_out", "finish")
    parts: list[_Part] = [(STAGE_SPAN.format(stage=stage), stages[stage], {}) for stage in before if stages.get(stage)]
    chunks = 0
    for stage, ns, tokens in record.pieces:
        attributes: Attributes = {}
        if tokens:
            chunks += 1
            attributes = {CHUNK: chunks, CHUNK_TOKENS: tokens}
        parts.append((STAGE_SPAN.format(stage=stage), ns, attributes))
    return [*parts, *((STAGE_SPAN.format(stage=stage), stages[stage], {}) for stage in after if stages.get(stage))]
