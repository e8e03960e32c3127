"""OTLP: whether and how anything is sent, decided by the standard OTEL_* variables. By default nothing is.

Owns the choice of exporters: HTTP (the standard's default) or gRPC, which is an extra (`pip install inferd[grpc]`),
because it is 20 MB of native code that the daemon otherwise does not need. OpenTelemetry's SDK is imported only if
something is sent. What cannot be set up is said in one line and switched off. Enter at `traces_from` and
`metrics_from`.
"""

import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from telemetry.genai import GenAiMetrics
    from telemetry.trace import Traces

log = logging.getLogger(__name__)

T = TypeVar("T")

_HTTP: Final = "http/protobuf"
_PACE_SECONDS: Final = 5.0  # the standard's default
_SAY_AGAIN_SECONDS = 60.0


def traces_from(version: str, environ: Mapping[str, str] = os.environ, slow_seconds: float = 30.0) -> "Traces | None":
    """Traces to where the variables say; None if they name no endpoint or switch traces off, or if that fails."""

    def make(protocol: str) -> "Traces":
        from telemetry.trace import Traces

        return Traces(_exporter(protocol, "trace_exporter", "OTLPSpanExporter"), version, slow_seconds=slow_seconds)

    return _set_up("TRACES", environ, make)


def metrics_from(version: str, environ: Mapping[str, str] = os.environ) -> "GenAiMetrics | None":
    """`gen_ai.server.*` to where the variables say; None as for traces."""

    def make(protocol: str) -> "GenAiMetrics":
        from telemetry.genai import GenAiMetrics

        return GenAiMetrics(_exporter(protocol, "metric_exporter", "OTLPMetricExporter"), version)

    return _set_up("METRICS", environ, make)


def pace_seconds(environ: Mapping[str, str] = os.environ) -> float:
    """How long spans are gathered for one export, as an export costs a round trip: OTEL_BSP_SCHEDULE_DELAY."""
    given = environ.get("OTEL_BSP_SCHEDULE_DELAY", "").strip()
    return int(given) / 1000 if given.isdigit() else _PACE_SECONDS


def _set_up(signal: str, environ: Mapping[str, str], make: Callable[[str], T]) -> T | None:
    def asked(name: str) -> str:
        return (
            environ.get(f"OTEL_EXPORTER_OTLP_{signal}_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")
        ).strip()

    endpoint = asked("ENDPOINT")
    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporters = (environ.get(f"OTEL_{signal}_EXPORTER", "").strip() or "otlp").split(",")
    if not endpoint or disabled or "otlp" not in exporters:
        return None
    protocol = asked("PROTOCOL") or _HTTP
    what = f"{signal.lower()} to {endpoint} are off"
    try:
        if protocol not in (_HTTP, "grpc"):
            log.error("%s: OTLP over %s is not served, only %s and grpc", what, protocol, _HTTP)
            return None
        made = make(protocol)
    except ImportError as error:
        log.error(
            "%s: OTLP over %s needs a package that is not installed (%s)%s", what, protocol, error, _remedy(protocol)
        )
        return None
    except Exception as error:  # noqa: BLE001 - a wrong variable, certificate or address must not stop the daemon
        log.error("%s: %s: %s", what, type(error).__name__, error)
        return None
    _quieten(logging.getLogger("opentelemetry"))
    return made


def _exporter(protocol: str, module: str, name: str) -> Any:
    """Raises ImportError. The exporters read endpoint, headers, certificates, timeout and compression themselves."""
    transport = "grpc" if protocol == "grpc" else "http"
    return getattr(importlib.import_module(f"opentelemetry.exporter.otlp.proto.{transport}.{module}"), name)()


def _remedy(protocol: str) -> str:
    return ": pip install 'inferd[grpc]'" if protocol == "grpc" else ""


def _quieten(library: logging.Logger) -> None:
    """The library logs every export that fails, once a second while a collector is away; the loss is counted anyway."""
    if not any(isinstance(handler, _Seldom) for handler in library.handlers):
        library.addHandler(_Seldom())
        library.propagate = False


class _Seldom(logging.Handler):
    """Passes a line on to our log at most once a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SAY_AGAIN_SECONDS
            log.warning("OTLP export: %s (said at most once a minute)", record.getMessage())
