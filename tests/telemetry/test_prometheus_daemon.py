"""A real Prometheus scrapes a whole daemon (around a scripted engine) and agrees with what its clients saw."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

from tests.fakes.daemon import running
from tests.fakes.port import saying
from tests.fakes.prometheus import Prometheus, scraping, until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CHOICES = 6


async def test_prometheus_knows_what_the_clients_saw(tmp_path: Path) -> None:
    """Counts, states, the sum of the stages, shed and refused requests, and the client's own trace id as exemplar."""
    async with running(tmp_path, saying("word " * 4), step_s=0.002) as made:
        with ExitStack() as stack:
            target = made.addresses.api.removeprefix("http://")
            prometheus = await asyncio.to_thread(stack.enter_context, scraping(target, tmp_path))
            await asyncio.to_thread(until, lambda: prometheus.query('inferd_state{state="ready"} == 1'))

            tokens = 0
            for _ in range(CHOICES):
                headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
                async with made.api.post(
                    f"{made.addresses.api}/v1/chat/completions", json=CHAT, headers=headers
                ) as answer:
                    assert answer.status == 200
                    tokens += (await answer.json())["usage"]["completion_tokens"]
            assert (await made.post("/v1/chat/completions", {**CHAT, "max_tokens": -1}))[0] == 400

            def known() -> bool:
                return bool(prometheus.query("sum(inferd_requests_finished_total) > 6"))

            await asyncio.to_thread(until, known)
            await asyncio.to_thread(_agrees, prometheus, tokens)  # this loop answers the scrapes meanwhile


def _agrees(prometheus: Prometheus, tokens: int) -> None:
    then = prometheus.as_of('inferd_requests_finished_total{reason="rejected"}')
    ended = {labels["reason"]: n for labels, n in then.query("inferd_requests_finished_total > 0")}
    assert ended == {"stop": CHOICES, "rejected": 1}
    assert then.one("inferd_time_to_first_token_seconds_count") == CHOICES
    assert then.one("inferd_output_tokens_per_request_sum") == tokens
    assert then.one("vllm:generation_tokens_total") == tokens
    assert then.one("sum(inferd_request_stage_seconds_sum)") >= then.one("inferd_request_seconds_sum")
    assert then.one("sum(inferd_requests)") == 0
    assert then.one("scrape_samples_scraped") < 3000
    found = then.get("query_exemplars", query="inferd_time_to_first_token_seconds_bucket", start="0", end="9999999999")
    assert {e["labels"]["trace_id"] for series in found for e in series["exemplars"]} == {TRACE}
