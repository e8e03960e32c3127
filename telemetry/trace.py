"""Traces: which finished choices and started engines are exported as spans, how detailed, and the export itself.

Owns the level, which may be changed at any time, and the rule: what was sampled at its arrival, and always faults and
slow ones. The trees are telemetry/spans.py's. Enter at `Traces.take`, a sink of the bus (telemetry/otlp.py makes one if
an endpoint is set). It exports on its own thread, so a collector that is down, slow or wrong fills that sink's queue,
whose losses are counted, and nothing else.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from telemetry.bus import Undelivered
from telemetry.events import Decision, EngineStarted, Event, LimitsChanged, LimitsView, RequestRecord
from telemetry.semconv import FAULTS
from telemetry.spans import Tree

_DECISIONS = 256  # of the tuner: those that a request under way can have seen


class Traces:
    """Turns events into spans and hands them to `exporter`. `take` runs on one thread; `level` may be set from any."""

    wants: tuple[type[Event], ...] = (RequestRecord, EngineStarted, LimitsChanged, Decision)

    def __init__(
        self,
        exporter: SpanExporter,
        version: str,
        *,
        slow_seconds: float = 30.0,
        clock: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Faults and requests slower than `slow_seconds` are exported even if they were not sampled."""
        self.level = "request"
        self._exporter = exporter
        self._tree = Tree(version)
        self._slow_ns = round(slow_seconds * 1e9)
        self._clock = clock
        self._wall_ns = wall_ns
        self._limits: LimitsView | None = None
        self._block_size = 0
        self._decisions: deque[Decision] = deque(maxlen=_DECISIONS)

    def take(self, batch: Sequence[Event]) -> None:
        """Export what the batch has to tell. Raises Undelivered if the exporter does not take it."""
        level = self.level
        offset_ns = self._wall_ns() - self._clock()
        spans: list[ReadableSpan] = []
        told = 0
        for event in batch:
            made = self._spans(event, offset_ns, level)
            told += bool(made)
            spans += made
        if spans and self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise Undelivered(told, "the trace collector did not take the spans")

    def close(self) -> None:
        self._exporter.shutdown()

    def _spans(self, event: Event, offset_ns: int, level: str) -> list[ReadableSpan]:
        if isinstance(event, LimitsChanged):
            self._limits = event.limits
        elif isinstance(event, Decision):
            self._decisions.append(event)
        elif isinstance(event, EngineStarted):
            self._limits = event.limits
            self._block_size = int(event.resolved.get("block_size", 0))
            return self._tree.start(event, offset_ns) if level != "off" else []
        elif isinstance(event, RequestRecord) and level != "off" and self._wanted(event):
            return self._tree.request(
                event,
                offset_ns,
                detail=level == "detail",
                limits=self._limits,
                block_size=self._block_size,
                decisions=self._decisions,
            )
        return []

    def _wanted(self, record: RequestRecord) -> bool:
        return record.trace_sampled or record.reason in FAULTS or record.at_ns - record.arrival_ns >= self._slow_ns
