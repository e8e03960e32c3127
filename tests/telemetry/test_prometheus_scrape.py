"""A real Prometheus scrapes an exposition under load and is queried back: figures, exemplars, dashboard, rules."""

import itertools
import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from telemetry import events
from telemetry.exposition import Exposition, rows
from telemetry.fold import Fold
from telemetry.metric import Outside
from tests.fakes import promql
from tests.fakes.prometheus import Prometheus, scraping, until

MS = 1_000_000
DASHBOARD = Path(__file__).resolve().parents[2] / "telemetry" / "grafana" / "inferd.json"
TRACE = "ab" * 16
LIMITS = events.LimitsView(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    prefill_chunk=64,
    max_partial_prefills=1,
    context_limit=512,
    kv_blocks=64,
    spec_depth=0,
)


class Daemon:
    """An exposition on a port, over a fold that is fed with what a serving daemon publishes."""

    def __init__(self) -> None:
        self.fold = Fold("tiny")
        exposition = Exposition(self.fold, outside=self._outside, build={"version": "0", "python": "3"})

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, content_type = exposition.render(self.headers.get("Accept", ""))
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.target = f"127.0.0.1:{self.server.server_port}"
        self.served = 0

    def _outside(self) -> Outside:
        return Outside(
            dropped={"journal": 0, "trace": self.served},
            sizes={"streams": 2},
            resident_bytes=90 << 20,
            cpu_seconds=self.served / 1000,
        )

    def start(self) -> None:
        now = self.fold.clock()
        resolved = {"block_size": 16, "kv_blocks": 64, "kv_dtype": "float32", "kv_block_bytes": 1000}
        phases = {"load": 900 * MS, "profile": 300 * MS, "total": 1300 * MS}
        booked = {"weights": 5 << 20, "kv_free": 1 << 20, "workspace": 1 << 20}
        self.fold.take(
            [
                events.StateChanged(at_ns=now, state="ready", why="loaded"),
                events.EngineStarted(
                    at_ns=now,
                    engine_id="e",
                    pid=7,
                    restarts=0,
                    phases=phases,
                    resolved=resolved,
                    reasons={},
                    limits=LIMITS,
                ),
                events.MemoryReport(
                    at_ns=now, process="engine", device="cpu", booked=booked, measured={}, limit_bytes=64 << 20
                ),
                events.LoopLag(at_ns=now, loop="api", lags_us=(200, 300)),
            ]
        )

    def serve(self) -> None:
        """One step and one finished choice, 100 ms of prefill and 200 ms of decode long."""
        now, name = self.fold.clock(), f"r{self.served}"
        self.served += 1
        stages = {"admission": MS, "queue": 49 * MS, "prefill": 100 * MS, "decode": 200 * MS}
        begun = now - sum(stages.values())
        self.fold.take(
            [_status(now, self.served), _step(now, name), _first(now, name), _record(now, name, begun, stages)]
        )


def _status(now: int, steps: int) -> events.Event:
    return events.EngineStatus(
        at_ns=now, state="ready", progress_ns=now, steps=steps, limits=LIMITS, sizes={"waiting": 5}, running=2,
        waiting=5, rss_bytes=80 << 20, cpu_ns=steps * MS, kv_active=10, kv_cached=20, kv_free=34,
    )  # fmt: skip


def _step(now: int, name: str) -> events.Event:
    return events.StepReport(
        at_ns=now, step=1, plan_ns=MS, launch_ns=2 * MS, collect_ns=20 * MS, commit_ns=MS, publish_ns=MS // 10,
        forward_ns=18 * MS, sample_ns=2 * MS, prefill_tokens=30, decode_tokens=2, recompute_tokens=4, running=2,
        waiting=5, waiting_kv=2, waiting_budget=1, kv_active=10, kv_cached=20, kv_free=34, kv_tail_slots=16,
        prefix_hit_tokens=16, prefix_miss_tokens=30, preemptions=(events.Preempted(name, 48, "kv"),),
        gaps_us=struct.pack("<2I", 20_000, 30_000), bound="bandwidth",
    )  # fmt: skip


def _first(now: int, name: str) -> events.Event:
    return events.FirstToken(at_ns=now, request_id=name, ttft_ns=150 * MS, trace_id=TRACE)


def _record(now: int, name: str, begun: int, stages: dict[str, int]) -> events.Event:
    return events.RequestRecord(
        at_ns=now, request_id=name, group_id=name, index=0, model="tiny", operation="chat", stream=True,
        arrival_ns=begun, stages=stages, overlaps={"detokenize": MS, "send": MS}, reason="length", prompt_tokens=46,
        cached_tokens=16, output_tokens=5, queued_ns=begun + MS, scheduled_ns=begun + 50 * MS,
        first_token_ns=begun + 150 * MS, last_token_ns=now, prefill_chunks=1, max_tokens=5, trace_id=TRACE,
        trace_sampled=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Prometheus]]:
    """A daemon that has served under Prometheus's eyes, idle now."""
    daemon = Daemon()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(daemon.server.serve_forever, 0.05)
        try:
            with scraping(daemon.target, tmp_path_factory.mktemp("prometheus")) as prometheus:
                until(lambda: prometheus.query('inferd_requests_finished_total{reason="length"} == 0'))
                daemon.start()
                until(lambda: daemon.serve() or prometheus.query('inferd_requests_finished_total{reason="length"} > 9'))
                finished = 'inferd_requests_finished_total{reason="length"}'
                until(lambda: prometheus.query(f"{finished} == {daemon.served}"))
                yield daemon, prometheus.as_of(finished)
        finally:
            daemon.server.shutdown()
            daemon.server.server_close()


def test_the_figures_come_back(scraped: tuple[Daemon, Prometheus]) -> None:
    daemon, prometheus = scraped
    served = daemon.served
    assert prometheus.one("up") == 1
    assert prometheus.one("inferd_time_to_first_token_seconds_count") == served
    assert prometheus.one('inferd_step_tokens_total{kind="decode"}') == 2 * served
    assert prometheus.one('inferd_requests{state="waiting", reason="kv"}') == 2
    assert prometheus.one("sum(inferd_kv_blocks)") == 64
    assert prometheus.one('inferd_state{state="ready"}') == 1
    assert prometheus.one("sum(inferd_state)") == 1
    assert prometheus.one("sum(inferd_engine_start_seconds)") == pytest.approx(1.3)
    assert 0.1 < prometheus.one("histogram_quantile(0.5, inferd_time_to_first_token_seconds_bucket)") <= 0.25


def test_the_stages_of_the_requests_sum_to_their_latency(scraped: tuple[Daemon, Prometheus]) -> None:
    _, prometheus = scraped
    stages = prometheus.one("sum(inferd_request_stage_seconds_sum)")
    assert stages == pytest.approx(prometheus.one("inferd_request_seconds_sum"))
    assert stages > 0


def test_vllm_names_carry_the_same_figures(scraped: tuple[Daemon, Prometheus]) -> None:
    daemon, prometheus = scraped
    assert prometheus.one('vllm:request_success_total{finished_reason="length"}') == daemon.served
    assert prometheus.one("vllm:time_to_first_token_seconds_count") == daemon.served
    [(labels, usage)] = prometheus.query("vllm:kv_cache_usage_perc")
    assert usage == pytest.approx(10 / 64)
    assert labels["model_name"] == "tiny"


def test_exemplars_lead_from_a_latency_to_its_trace(scraped: tuple[Daemon, Prometheus]) -> None:
    _, prometheus = scraped
    for histogram in ("inferd_time_to_first_token_seconds", "inferd_request_seconds"):
        found = prometheus.get("query_exemplars", query=f"{histogram}_bucket", start="0", end="9999999999")
        traces = {e["labels"]["trace_id"] for series in found for e in series["exemplars"]}
        assert traces == {TRACE}, histogram


def queries() -> list[str]:
    """The dashboard's expressions as Grafana would send them."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [t["expr"] for p in panels for t in p.get("targets", ()) if "expr" in t]
    return [e.replace("$instance", ".*").replace("$__rate_interval", "30s") for e in asked]


def test_the_dashboard_shows_what_is_exposed(scraped: tuple[Daemon, Prometheus]) -> None:
    """Every query is answered; with data, if each of its selectors alone has some: a join that never matches shows."""
    _, prometheus = scraped
    answered = {expression: prometheus.query(expression) for expression in queries()}
    selected = {e: {selector.text for selector in promql.read(e).selectors} for e in answered}
    filled = {selector for selector in set().union(*selected.values()) if prometheus.query(selector)}
    assert [e for e, found in answered.items() if not found and selected[e] <= filled] == []
    assert sum(bool(found) for found in answered.values()) > len(answered) // 2


def test_the_alert_rules_evaluate_against_the_real_series(scraped: tuple[Daemon, Prometheus]) -> None:
    _, prometheus = scraped
    groups = prometheus.get("rules")["groups"]
    rules = list(itertools.chain.from_iterable(group["rules"] for group in groups))
    assert len(rules) > 20
    assert [(r["name"], r.get("lastError")) for r in rules if r["health"] == "err"] == []
    alerts: list[dict[str, Any]] = []

    def lossy() -> list[dict[str, Any]]:
        alerts[:] = prometheus.get("alerts")["alerts"]
        return [a for a in alerts if a["labels"].get("sink") == "trace"]

    until(lossy)
    firing = [a for a in alerts if a["state"] == "firing"]  # one that is pending may be a scrape that came too late
    assert not [a for a in firing if a["labels"]["severity"] == "critical"], "this daemon is well"
    [lost] = [a for a in alerts if a["labels"].get("sink") == "trace"]
    assert "loses telemetry (sink trace)" in lost["annotations"]["summary"]
    assert lost["annotations"]["command"] == "inferd doctor runbook telemetry_lost"


def test_what_has_no_owner_has_no_series(scraped: tuple[Daemon, Prometheus]) -> None:
    """Registered names without an owner are not shown as zero, and only registered names come back."""
    _, prometheus = scraped
    present = {labels["__name__"] for labels, _ in prometheus.query('{job="inferd",__name__!~"ALERTS.*|scrape_.*"}')}
    assert present <= promql.series(rows()).keys()
    assert not {name for name in present if name.startswith(("inferd_device_", "inferd_spec_"))}
