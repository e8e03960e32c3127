"""The figures of a load report, from samples made by hand."""

import json

import pytest

from daemon.load.client import Sample
from daemon.load.report import Run, percentile, render, summarize, timeline, warnings


def sample(**changes: object) -> Sample:
    """Due at 0, sent at 0.1, first text at 0.3, then every 0.1 s to 0.6, ended at 0.7; four tokens."""
    values: dict[str, object] = {
        "kind": "short",
        "prompt_tokens_aimed": 100,
        "due_s": 0.0,
        "started_s": 0.02,
        "pooled_s": 0.05,
        "sent_s": 0.1,
        "ended_s": 0.7,
        "chunks_s": [0.3, 0.4, 0.5, 0.6],
        "finish_reason": "length",
        "prompt_tokens": 101,
        "output_tokens": 4,
        "counted": True,
    }
    return Sample(**{**values, **changes})  # type: ignore[arg-type]


def run(*samples: Sample, ended_s: float = 2.0, interrupted: bool = False) -> Run:
    about = {"url": "http://x", "model": "m", "scenario": "short", "load": "1", "seed": 0, "prompt_sizes": "tokenize"}
    return Run(
        about=about,
        samples=samples,
        unfinished=0,
        began_s=0.0,
        ended_s=ended_s,
        lag_s=[0.001],
        interrupted=interrupted,
    )


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (100, 4.0), (95, 3.85)])
def test_percentiles_are_interpolated(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)


def test_a_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_latencies_are_counted_from_the_wire_and_the_clients_waiting_apart() -> None:
    report = summarize(run(sample()))
    server, client = report["latency_s"], report["client_s"]
    assert server["ttft"]["p50"] == pytest.approx(0.2)
    assert server["inter_token"] == {
        "count": 3,
        "mean": pytest.approx(0.1),
        "p50": pytest.approx(0.1),
        "p95": pytest.approx(0.1),
        "p99": pytest.approx(0.1),
        "max": pytest.approx(0.1),
    }
    assert server["per_output_token"]["p50"] == pytest.approx(0.1)
    assert server["end_to_end"]["p50"] == pytest.approx(0.6)
    assert client["wait"]["p50"] == pytest.approx(0.1)
    assert client["connection"]["p50"] == pytest.approx(0.05)


def test_failures_are_counted_by_kind_and_kept_out_of_the_latencies() -> None:
    slow = sample(error="http_500", ended_s=1.9, chunks_s=[])
    report = summarize(run(sample(), slow, sample(error="http_500"), sample(error="connect", chunks_s=[])))
    assert report["requests"] == {"ok": 1, "failed": 3, "unfinished": 0}
    assert report["errors"] == {"http_500": 2, "connect": 1}
    assert report["latency_s"]["end_to_end"]["count"] == 1
    assert report["rates"]["output_tokens_per_s"] == pytest.approx(2.0)


def test_the_time_line_places_everything_in_its_second() -> None:
    late = sample(sent_s=0.9, chunks_s=[1.2, 1.4], ended_s=1.5, output_tokens=6)
    rows = timeline(run(sample(), late))
    assert [(r["sent"], r["finished"], r["running"], r["tokens"]) for r in rows] == [
        (2, 1, 2, 4),
        (0, 1, 1, 6),
        (0, 0, 0, 0),
    ]
    assert rows[1]["ttft_p95"] == pytest.approx(0.3)
    assert rows[2]["ttft_p95"] is None


def test_kinds_are_shown_apart_where_there_are_several() -> None:
    assert summarize(run(sample()))["latency_by_kind_s"] == {}
    report = summarize(run(sample(), sample(kind="long", chunks_s=[0.6])))
    assert set(report["latency_by_kind_s"]) == {"long", "short"}
    assert report["latency_by_kind_s"]["long"]["ttft"]["p50"] == pytest.approx(0.5)


def test_what_must_be_known_is_said() -> None:
    assert warnings(summarize(run(sample()))) == []
    assert "waited in this client" in warnings(summarize(run(sample(due_s=-1.0))))[0]
    merged = sample(output_tokens=8, counted=False, due_s=0.1, cached_tokens=60)
    notes = " ".join(warnings(summarize(run(merged))))
    assert "counted as chunks" in notes
    assert "2.0 tokens a chunk" in notes
    assert "prefix cache" in notes


def test_a_report_is_json_and_text_even_of_nothing() -> None:
    for report in (summarize(run()), summarize(run(sample(), interrupted=True)), summarize(run(ended_s=0.0))):
        json.loads(json.dumps(report))
        assert "requests/s" in render(report)
    assert "interrupted" in render(summarize(run(sample(), interrupted=True)))


def test_a_long_time_line_is_thinned_to_a_screenful() -> None:
    text = render(summarize(run(sample(), ended_s=600.0)))
    assert len(text.splitlines()) < 60
