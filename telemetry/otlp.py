"""OTLP: whether anything is sent anywhere, decided by the standard OTEL_* variables. By default nothing is.

It imports OpenTelemetry's SDK only if it is needed. Enter at `traces_from`.
"""

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from telemetry.trace import Traces

log = logging.getLogger(__name__)


def traces_from(version: str, environ: Mapping[str, str] = os.environ, slow_seconds: float = 30.0) -> "Traces | None":
    """Traces to where the variables say; None if they name no endpoint or switch traces off, or if that fails."""
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not endpoint or disabled or environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from telemetry.trace import Traces

        return Traces(OTLPSpanExporter(), version, slow_seconds=slow_seconds)
    except Exception:
        log.exception("traces are off: OTLP to %s cannot be set up", endpoint)
        return None
