"""An OTLP collector made of the official protobuf service definitions: gRPC and HTTP on loopback, all kept in memory.

`with Collector() as collector` listens on both; `collector.environ(protocol)` are a daemon's standard variables for it.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


@dataclass(frozen=True)
class Span:
    """One span as it arrived; ids as hex, attributes as plain values."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    status: int
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass(frozen=True)
class Tree:
    """One root and its children, in the order of their beginnings."""

    root: Span
    children: tuple[Span, ...]

    @property
    def names(self) -> list[str]:
        return [child.name for child in self.children]


class Collector:
    """Keeps every span and the last value of every metric series."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self.payloads: list[bytes] = []  # all that ever came, as it came
        self._metrics: dict[str, list[Any]] = {}  # name → the data points of its last export
        self._grpc = grpc.server(ThreadPoolExecutor(2))
        trace_grpc.add_TraceServiceServicer_to_server(_Traces(self), self._grpc)
        metrics_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), self._grpc)
        self._grpc_port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))

    def environ(self, protocol: str) -> dict[str, str]:
        port = self._grpc_port if protocol == "grpc" else self._http.server_address[1]
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }

    def __enter__(self) -> "Collector":
        self._grpc.start()
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._grpc.stop(None).wait()

    def take_traces(self, request: Any) -> None:
        spans = [
            _span(span, _plain(group.resource.attributes))
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += spans
            self.payloads.append(request.SerializeToString())

    def take_metrics(self, request: Any) -> None:
        with self._lock:
            self.payloads.append(request.SerializeToString())
            for group in request.resource_metrics:
                for scope in group.scope_metrics:
                    for metric in scope.metrics:
                        self._metrics[metric.name] = list(metric.histogram.data_points)

    def trees(self, name: str = "") -> list[Tree]:
        """Every root of that name that has arrived, with its children."""
        with self._lock:
            spans = list(self._spans)
        ids = {span.span_id for span in spans}
        assert len(ids) == len(spans), "a span id was used twice"
        roots = [span for span in spans if span.parent_id not in ids]
        by_parent: dict[str, list[Span]] = {}
        for span in spans:
            by_parent.setdefault(span.parent_id, []).append(span)
        return [
            Tree(root, tuple(sorted(by_parent.get(root.span_id, []), key=lambda s: (s.begin_ns, s.end_ns))))
            for root in roots
            if root.name == name or not name
        ]

    def metric(self, name: str) -> list[Any]:
        """The data points of its last export."""
        with self._lock:
            return list(self._metrics.get(name, []))


def attributes_of(point: Any) -> dict[str, Any]:
    return _plain(point.attributes)


def _span(span: Any, resource: dict[str, Any]) -> Span:
    return Span(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        status=span.status.code,
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_plain(span.attributes),
        resource=resource,
    )


def _plain(attributes: "list[KeyValue]") -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None


class _Traces(trace_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:
        self._collector.take_traces(request)
        return trace_pb.ExportTraceServiceResponse()


class _Metrics(metrics_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:
        self._collector.take_metrics(request)
        return metrics_pb.ExportMetricsServiceResponse()


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    routes = {
        "/v1/traces": (trace_pb.ExportTraceServiceRequest, collector.take_traces),
        "/v1/metrics": (metrics_pb.ExportMetricsServiceRequest, collector.take_metrics),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message, take = routes[self.path]
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.headers["content-type"] == "application/x-protobuf"
            take(message.FromString(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
