"""Traces. The question: and this one request? Enter at `panels`."""

from typing import Final

from grafana_foundation_sdk.builders import table, tempo
from grafana_foundation_sdk.builders.dashboard import Panel
from grafana_foundation_sdk.models.tempo import SearchTableType

from telemetry.grafana.panels import TEMPO, Panels

TITLE: Final = "Traces"
_OURS: Final = 'span.gen_ai.provider.name = "inferd" && kind = server'
_SEARCH: Final = f"{{ {_OURS} && (duration > $slower_than || status = error) }}"


def panels() -> Panels:
    """The panels of this row, in reading order."""
    return [
        table.Panel()
        .title("Slow and failed requests")
        .description(
            "Requests of the chosen period that took longer than the minimum, or failed. A click opens the trace."
        )
        .datasource(TEMPO)
        .span(12)
        .height(10)
        .with_target(
            tempo.TempoQuery()
            .ref_id("A")
            .datasource(TEMPO)
            .query_type("traceql")
            .query(_SEARCH)
            .limit(20)
            .table_type(SearchTableType.TRACES)
        ),
        Panel()
        .type("traces")
        .title("Trace $trace_id")
        .description("Paste a trace id above (from the log, an exemplar or X-Request-Id's record).")
        .datasource(TEMPO)
        .span(12)
        .height(10)
        .with_target(
            tempo.TempoQuery().ref_id("A").datasource(TEMPO).query_type("traceql").query("$trace_id").limit(1)
        ),
    ]
