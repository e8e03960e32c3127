"""The tuner's decisions on the spans of the requests that lived through them."""

from collections.abc import Sequence

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from telemetry.events import Decision
from telemetry.trace import Traces
from tests.autotune.records import record


class Kept(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


def decision(at_s: float, verdict: str = "") -> Decision:
    return Decision(
        at_ns=int(at_s * 1e9), number=7, rule="growth", knob="max_num_seqs", direction="up", before=2, after=4,
        evidence={"running": 2.0}, predicted={"goodput": 80.0}, verdict=verdict, why="3 wait for a row",
        measured={"before": 40.0, "after": 81.0} if verdict else {},
    )  # fmt: skip


def test_a_decision_is_an_event_of_the_requests_it_fell_into_and_of_no_other() -> None:
    exporter = Kept()
    traces = Traces(exporter, "1", clock=lambda: 0, wall_ns=lambda: 10**18)
    lived = msgspec.structs.replace(record(1, arrival_s=10, output=30, ttft_s=1, gap_s=0.2), trace_sampled=True)
    later = msgspec.structs.replace(record(2, arrival_s=20, output=5, ttft_s=1, gap_s=0.2), trace_sampled=True)
    traces.take([decision(12), decision(15, "kept: goodput 40 → 81"), decision(19), lived, later])
    first, second = (span for span in exporter.spans if span.parent is None)
    made, judged = first.events
    assert second.events == ()
    assert (made.name, made.timestamp) == ("inferd.decision", 10**18 + 12 * 10**9)
    assert made.attributes is not None
    assert judged.attributes is not None
    assert made.attributes["inferd.decision.rule"] == "growth"
    assert made.attributes["inferd.decision.evidence.running"] == 2.0
    assert made.attributes["inferd.decision.verdict"] == ""
    assert judged.attributes["inferd.decision.verdict"] == "kept: goodput 40 → 81"
    assert judged.attributes["inferd.decision.measured.after"] == 81.0
