"""The exposition: parsed by Prometheus's own parsers; names, types and labels are a promise kept in a golden list."""

import math
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import parser as text_parser
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import parser as open_parser

from telemetry import events, plugins
from telemetry.exposition import Exposition, rows
from telemetry.fold import Fold
from telemetry.metric import Metric, Outside, Reading, View, one

GOLDEN = Path(__file__).with_name("golden_metrics.txt")
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
S = 1_000_000_000
LIMITS = events.LimitsView(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    prefill_chunk=64,
    max_partial_prefills=1,
    context_limit=512,
    kv_blocks=64,
    spec_depth=0,
)


@pytest.fixture
def fold() -> Fold:
    """A fold that has seen an engine start, serve, preempt and report."""
    fold = Fold("smollm2", clock=lambda: 20 * S, wall=lambda: 1.7e9)
    resolved = {"block_size": 16, "kv_blocks": 64, "kv_dtype": "float32", "kv_block_bytes": 1000, "prefix_cache": True}
    fold.take(
        [
            events.EngineStarted(
                at_ns=S, engine_id="e", pid=7, restarts=0, phases={}, resolved=resolved, reasons={}, limits=LIMITS
            ),
            events.StepReport(
                at_ns=10 * S,
                step=1,
                plan_ns=S // 1000,
                collect_ns=S // 50,
                forward_ns=S // 60,
                prefill_tokens=30,
                decode_tokens=2,
                running=2,
                waiting=5,
                waiting_kv=2,
                waiting_budget=1,
                kv_active=10,
                kv_cached=20,
                kv_free=34,
                kv_tail_slots=16,
                prefix_hit_tokens=16,
                prefix_miss_tokens=30,
                preemptions=(events.Preempted("r", 48, "kv"),),
                gaps_us=struct.pack("<2I", 20_000, 30_000),
                bound="bandwidth",
            ),
            events.FirstToken(at_ns=11 * S, request_id="r", ttft_ns=S // 5, trace_id="ab" * 16),
            events.RequestRecord(
                at_ns=12 * S,
                request_id="r",
                group_id="r",
                index=0,
                model="smollm2",
                operation="chat",
                stream=False,
                arrival_ns=10 * S,
                stages={"decode": 2 * S},
                reason="length",
                prompt_tokens=46,
                cached_tokens=16,
                output_tokens=3,
                queued_ns=10 * S,
                scheduled_ns=10 * S + 1,
                first_token_ns=11 * S,
                last_token_ns=12 * S,
                trace_id="ab" * 16,
            ),
            events.MemoryReport(
                at_ns=12 * S, process="engine", device="cpu", booked={"weights": 500}, measured={}, limit_bytes=9000
            ),
            events.LoopLag(at_ns=12 * S, loop="api", lags_us=(100, 90_000)),
        ]
    )
    return fold


def samples(families: Iterable[Family]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(exposition: Exposition, name: str, **labels: str) -> float:
    text = exposition.render()[0].decode()
    found = samples(text_parser.text_string_to_metric_families(text))
    own = "model_name" if name.startswith("vllm:") else "model"
    return found[name, tuple(sorted({own: "smollm2", "engine": "0", **labels}.items()))]


def test_names_types_and_labels_are_the_golden_ones() -> None:
    """A change here breaks somebody's dashboard: it must be deliberate. The list is the exposition's own, in order."""
    shown = [f"{row.name} {row.kind} {','.join(row.labels)}".rstrip() for row in rows()]
    shown += [f"{row.name} {row.kind} legacy" for row in rows(legacy=True) if row.legacy]
    assert sorted(shown) == GOLDEN.read_text(encoding="utf-8").splitlines()


DEAD = events.EngineEnded(at_ns=15 * S, engine_id="e", cause="crash", detail="")
DRAINING = events.StateChanged(at_ns=15 * S, state="draining", why="told to")


@pytest.mark.parametrize("accept", ["text/plain", OPENMETRICS])
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("mode", ["starting", "serving", "draining", "engine dead"])
def test_the_golden_names_are_there_in_every_mode(fold: Fold, mode: str, legacy: bool, accept: str) -> None:
    """Whatever has happened or not: nothing is missing, and nothing else turns up."""
    if mode == "starting":
        fold = Fold("smollm2")
    fold.take({"draining": [DRAINING], "engine dead": [DEAD]}.get(mode, []))
    body = Exposition(fold, rows(legacy=legacy), build={"version": "1", "python": "3"}).render(accept)[0].decode()
    shown = {tuple(line.split()[2:]) for line in body.splitlines() if line.startswith("# TYPE")}
    golden = [line.split() for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    counted = accept != OPENMETRICS  # the text format names a counter's family as its samples
    assert shown == {
        (name + "_total" * (counted and kind == "counter"), kind)
        for name, kind, *rest in golden
        if legacy or "legacy" not in rest
    }


@pytest.mark.parametrize("accept", ["", "text/plain", OPENMETRICS])
def test_prometheus_own_parser_reads_it_and_finds_every_name(fold: Fold, accept: str) -> None:
    body, content_type = Exposition(fold, build={"version": "1", "python": "3"}).render(accept)
    openmetrics = accept == OPENMETRICS
    assert content_type.startswith("application/openmetrics-text" if openmetrics else "text/plain")
    parse = open_parser if openmetrics else text_parser
    families = list(parse.text_string_to_metric_families(body.decode()))
    found = {family.name for family in families}
    registered = {row.name for row in rows()}
    assert registered <= {
        line.split()[2].removesuffix("_total") for line in body.decode().splitlines() if "# TYPE" in line
    } | {"vllm:iteration_tokens_total"}
    assert found >= {"inferd_requests", "vllm:num_requests_running", "inferd_step_seconds"}


def test_a_name_is_registered_before_it_has_an_owner() -> None:
    body = Exposition(Fold("m")).render()[0].decode()
    assert "# TYPE inferd_device_power_watts gauge" in body
    assert "\ninferd_device_power_watts{" not in body
    assert "# TYPE vllm:spec_decode_num_drafts_total counter" in body


def test_closed_counters_start_at_zero() -> None:
    exposition = Exposition(Fold("smollm2"))
    for reason in events.FINISH_REASONS:
        assert value(exposition, "inferd_requests_finished_total", reason=reason) == 0


def test_the_figures_are_those_of_the_events(fold: Fold) -> None:
    exposition = Exposition(fold)
    assert value(exposition, "inferd_requests", state="running", reason="") == 2
    assert value(exposition, "inferd_requests", state="waiting", reason="kv") == 2
    assert value(exposition, "inferd_requests", state="waiting", reason="") == 2  # no step has looked at these yet
    assert value(exposition, "vllm:num_requests_waiting") == 5
    assert value(exposition, "vllm:kv_cache_usage_perc") == pytest.approx(10 / 64)
    assert value(exposition, "inferd_kv_fragmentation_ratio", kind="tail") == pytest.approx(0.1)
    assert value(exposition, "inferd_memory_bytes", device="cpu", owner="weights") == 500
    assert value(exposition, "inferd_memory_bytes", device="cpu", owner="kv_active") == 10_000
    assert value(exposition, "inferd_preempted_tokens_total", cause="kv") == 48
    assert value(exposition, "inferd_time_to_first_token_seconds_bucket", le="0.1") == 0
    assert value(exposition, "inferd_time_to_first_token_seconds_bucket", le="0.25") == 1
    assert value(exposition, "vllm:prompt_tokens_total") == 46
    assert value(exposition, "vllm:prefix_cache_hits_total") == 16
    assert value(exposition, "vllm:prefix_cache_queries_total") == 46
    assert value(exposition, "vllm:request_success_total", finished_reason="length") == 1
    assert value(exposition, "inferd_engine_progress_age_seconds") == pytest.approx(9.979)
    assert value(exposition, "inferd_tuner_limit", knob="kv_blocks") == 64


def test_native_and_vllm_histograms_are_two_views_of_the_same_counts(fold: Fold) -> None:
    exposition = Exposition(fold)
    for edge in ("0.01", "0.1", "1.0", "+Inf"):
        native = value(exposition, "inferd_inter_token_latency_seconds_bucket", le=edge)
        assert native == value(exposition, "vllm:inter_token_latency_seconds_bucket", le=edge)
    assert value(exposition, "inferd_inter_token_latency_seconds_sum") == pytest.approx(0.05)


def test_openmetrics_carries_the_trace_of_a_slow_one(fold: Fold) -> None:
    body, _ = Exposition(fold).render(OPENMETRICS)
    families = {family.name: family for family in open_parser.text_string_to_metric_families(body.decode())}
    linked = [s for s in families["inferd_time_to_first_token_seconds"].samples if s.exemplar]
    assert [s.labels["le"] for s in linked] == ["0.25"]
    assert linked[0].exemplar is not None
    assert linked[0].exemplar.labels == {"trace_id": "ab" * 16}
    assert linked[0].exemplar.value == pytest.approx(0.2)
    assert b"trace_id" not in Exposition(fold).render("text/plain")[0]


def test_every_latency_leads_to_a_trace_that_was_kept_and_to_no_other(fold: Fold) -> None:
    for sampled, trace in ((True, "cd" * 16), (False, "ef" * 16)):
        record = events.RequestRecord(
            at_ns=18 * S, request_id="x", group_id="x", index=0, model="m", operation="chat", stream=True,
            reason="stop", arrival_ns=10 * S, stages={}, output_tokens=3, queued_ns=10 * S, scheduled_ns=11 * S,
            first_token_ns=12 * S, last_token_ns=18 * S, trace_id=trace, trace_sampled=sampled,
        )  # fmt: skip
        gap = events.StepReport(
            at_ns=14 * S, step=2, gaps_us=struct.pack("<I", 700_000), longest_gap_us=700_000, longest_gap_of="x"
        )
        first = events.FirstToken(at_ns=12 * S, request_id="x", ttft_ns=2 * S, trace_id=trace if sampled else "")
        fold.take([first, gap, record])
    body = Exposition(fold).render(OPENMETRICS)[0].decode()
    found: dict[str, set[str]] = {}
    for family in open_parser.text_string_to_metric_families(body):
        for sample in family.samples:
            if sample.exemplar:
                found.setdefault(family.name, set()).add(sample.exemplar.labels["trace_id"])
    for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token", "request"):
        assert "cd" * 16 in found[f"inferd_{name}_seconds"], name
    assert not any("ef" * 16 in traces for traces in found.values())


@pytest.mark.parametrize("extra", ["", ";escaping=underscores", ";escaping=allow-utf-8", ";q=0.6"])
def test_the_colon_of_vllm_names_survives_every_way_to_ask(fold: Fold, extra: str) -> None:
    body = Exposition(fold).render("application/openmetrics-text;version=1.0.0" + extra)[0].decode()
    assert '\nvllm:num_requests_running{engine="0",model_name="smollm2"} 2.0\n' in body
    assert "\nvllm_" not in body


def test_older_names_are_served_when_asked_for(fold: Fold) -> None:
    assert b"vllm:gpu_cache_usage_perc" not in Exposition(fold).render()[0]
    old = Exposition(fold, rows(legacy=True))
    assert value(old, "vllm:gpu_cache_usage_perc") == pytest.approx(10 / 64)
    assert value(old, "vllm:gpu_prefix_cache_queries_total") == 46


def test_every_histogram_can_be_shown_with_its_buckets(fold: Fold) -> None:
    exposition = Exposition(fold, rows(legacy=True))
    exposition.render(OPENMETRICS)
    assert exposition.row_errors == 0
    for row in rows(legacy=True):
        assert list(row.buckets) == sorted(set(row.buckets))
        assert (row.kind == "histogram") == bool(row.buckets)
        assert math.inf not in row.buckets


def test_a_row_that_raises_is_counted_and_the_rest_is_served(fold: Fold) -> None:
    def broken(view: View) -> list[Reading]:
        raise ZeroDivisionError

    metrics = [Metric("inferd_broken", "gauge", "Raises.", broken), *rows()]
    exposition = Exposition(fold, metrics)
    exposition.render()
    assert exposition.row_errors == 1
    assert value(exposition, "inferd_telemetry_dropped_total", sink="metric_rows") == 1
    assert value(exposition, "vllm:num_requests_running") == 2


def test_a_label_outside_its_set_is_not_shown(fold: Fold) -> None:
    def stray(view: View) -> list[Reading]:
        return [(("good",), 1), (("a client's own string",), 1)]

    def many(view: View) -> list[Reading]:
        return [((f"{i}",), 1) for i in range(1000)]

    exposition = Exposition(
        fold,
        [
            Metric("inferd_closed", "gauge", "x", stray, {"kind": ("good",)}),
            Metric("inferd_open", "gauge", "x", many, {"kind": None}),
        ],
    )
    body = exposition.render()[0].decode()
    assert "client" not in body
    assert body.count("inferd_open{") == 64
    assert exposition.row_errors == 1 + 1000 - 64


def test_what_is_asked_outside_may_fail(fold: Fold) -> None:
    def broken() -> Outside:
        raise OSError

    exposition = Exposition(fold, outside=broken)
    assert value(exposition, "vllm:num_requests_running") == 2
    asked = Exposition(fold, outside=lambda: Outside(dropped={"journal": 3}, sizes={"streams": 2}, resident_bytes=5))
    assert value(asked, "inferd_telemetry_dropped_total", sink="journal") == 3
    assert value(asked, "inferd_map_entries", process="daemon", map="streams") == 2
    assert value(asked, "inferd_process_resident_bytes", process="daemon") == 5


def test_a_dead_engine_has_no_kv_and_runs_nothing(fold: Fold) -> None:
    fold.take([events.EngineEnded(at_ns=15 * S, engine_id="e", cause="crash", detail="")])
    exposition = Exposition(fold)
    body = exposition.render()[0].decode()
    assert value(exposition, "vllm:num_requests_running") == 0
    assert "\nvllm:kv_cache_usage_perc{" not in body
    assert "\ninferd_engine_progress_age_seconds{" not in body
    assert value(exposition, "inferd_preempted_tokens_total", cause="kv") == 48


def test_a_name_declared_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(plugins)("twice")
    module.ROWS = [Metric("x", "gauge", "", lambda view: one(1))] * 2
    monkeypatch.setattr(plugins, "load", lambda package: [module])
    with pytest.raises(ValueError, match="twice"):
        rows()


def test_a_scrape_stays_small(fold: Fold) -> None:
    assert len(Exposition(fold).render()[0]) < 150_000
