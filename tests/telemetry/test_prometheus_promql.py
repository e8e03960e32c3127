"""The reader that guards dashboards and alerts finds what is wrong with a query, and nothing in a right one."""

import pytest

from telemetry.exposition import rows
from tests.fakes import promql

KNOWN = promql.series(rows())


def test_it_sees_through_functions_groupings_ranges_and_strings() -> None:
    text = """
      histogram_quantile(0.99, sum by (le, stage) (
        rate(inferd_request_stage_seconds_bucket{stage=~"queue|prefill"}[5m])))
      > on (instance) group_left (model) 0.5 * up{job="by (nobody)"} offset 1h  # not inferd_nothing
    """
    read = promql.read(text)
    assert [s.name for s in read.selectors] == ["inferd_request_stage_seconds_bucket", "up"]
    assert read.selectors[0].matchers == {"stage": "queue|prefill"}
    assert read.selectors[1].text == 'up{job="by (nobody)"}'
    assert read.grouping == {"le", "stage", "instance", "model"}
    assert promql.faults(text, KNOWN) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("rate(inferd_requests_finished[5m])", "no metric inferd_requests_finished"),
        ('inferd_requests{stage="queue"}', "inferd_requests has no label stage"),
        ('inferd_requests{state="waiting",reason=~"kv|memory"}', "reason is never memory"),
        ("sum by (state) (inferd_kv_fragmentation_ratio)", "no metric here has the label state"),
        ("sum by (le) (inferd_request_seconds_sum)", "no metric here has the label le"),
    ],
)
def test_it_finds_a_planted_fault(text: str, fault: str) -> None:
    assert promql.faults(text, KNOWN) == [fault]
