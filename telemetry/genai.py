"""OTLP metrics: the server metrics of OpenTelemetry's GenAI conventions, from the records of finished choices.

Owns the three instruments and their boundaries, which the conventions prescribe. Who scrapes Prometheus needs none of
this: the same figures are in telemetry/metrics. Enter at `GenAiMetrics.take`, a sink of the bus; the SDK's own reader
exports every OTEL_METRIC_EXPORT_INTERVAL. The series are cumulative: an export that fails is counted, and the next one
that succeeds makes up for it.
"""

from collections.abc import Sequence
from typing import Any, Final

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource

from telemetry.events import NEVER_SERVED, Event, RequestRecord
from telemetry.semconv import PROVIDER, error_type, metric_attributes

# https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/
DURATION_SECONDS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TTFT_SECONDS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_SECONDS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class GenAiMetrics:
    """Records on the sink's thread; `exporter` is called on the reader's. `interval_ms` None: the standard variable."""

    wants: tuple[type[Event], ...] = (RequestRecord,)

    def __init__(self, exporter: MetricExporter, version: str, interval_ms: float | None = None) -> None:
        self._counting = _Counting(exporter)
        self._reader = PeriodicExportingMetricReader(self._counting, interval_ms)
        resource = Resource.create({"service.name": PROVIDER, "service.version": version})
        self._provider = MeterProvider([self._reader], resource, shutdown_on_exit=False)
        meter = self._provider.get_meter(PROVIDER, version)
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            "s",
            "Generative AI server request duration such as time-to-last byte or last output token.",
            explicit_bucket_boundaries_advisory=DURATION_SECONDS,
        )
        self._ttft = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "Time to generate first token for successful responses.",
            explicit_bucket_boundaries_advisory=TTFT_SECONDS,
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time per output token generated after the first token for successful responses.",
            explicit_bucket_boundaries_advisory=PER_TOKEN_SECONDS,
        )

    @property
    def failed_exports(self) -> int:
        return self._counting.failed

    def take(self, batch: Sequence[Event]) -> None:
        """Observe the records of the batch."""
        for event in batch:
            if isinstance(event, RequestRecord) and event.reason not in NEVER_SERVED:
                self._observe(event)

    def close(self) -> None:
        """Export what was observed since the last time, and stop."""
        self._provider.shutdown(timeout_millis=2000)

    def _observe(self, record: RequestRecord) -> None:
        attributes = metric_attributes(record)
        self._duration.record((record.at_ns - record.arrival_ns) / 1e9, attributes)
        if error_type(record) or not record.first_token_ns:
            return
        self._ttft.record((record.first_token_ns - record.arrival_ns) / 1e9, attributes)
        if record.output_tokens > 1:
            decode_ns = record.last_token_ns - record.first_token_ns
            self._per_token.record(decode_ns / (record.output_tokens - 1) / 1e9, attributes)


class _Counting(MetricExporter):
    """`inner`, with its failures counted: it may also raise."""

    def __init__(self, inner: MetricExporter) -> None:
        super().__init__(inner._preferred_temporality, inner._preferred_aggregation)
        self.failed = 0
        self._inner = inner

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        result = MetricExportResult.FAILURE
        try:
            result = self._inner.export(metrics_data, timeout_millis, **kwargs)
        finally:
            self.failed += result is not MetricExportResult.SUCCESS
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._inner.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self._inner.shutdown(timeout_millis, **kwargs)
