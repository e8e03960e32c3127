"""`inferd bench load` against a real daemon: what it counts is what the server's metrics grew by, to the token."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.daemon.load.truth import Scrape
from tests.fakes.tiny_served import tiny_served
from tests.served import INFERD, ROOT, Served, wait_for

pytestmark = pytest.mark.timeout(300)


def bench(served: Served, *flags: str) -> dict[str, object]:
    done = subprocess.run(
        [*INFERD, "bench", "load", "--url", served.url, "--json", *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    report: dict[str, object] = json.loads(done.stdout)
    return report


def _settled(served: Served, before: Scrape, requests: int) -> None:
    """The record of the last request reaches the metrics a moment after its client was answered."""

    def there() -> bool:
        return (Scrape.of(served) - before).total("inferd_requests_finished_total") >= requests

    wait_for(there, 60, "every request in the metrics")


def test_requests_and_tokens_are_those_of_the_servers_own_metrics(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    jobs = [{"at_s": 0.05 * n, "prompt_tokens": 30 + 5 * n, "output_tokens": 6 + n} for n in range(8)]
    trace.write_text("\n".join(map(json.dumps, jobs)))
    loads = {
        "closed": ("--concurrency", "4", "--requests", "12"),
        "open": ("--scenario", "shared", "--rate", "6", "--duration", "2", "--arrival", "bursty"),
        "turns": ("--scenario", "turns", "--concurrency", "3", "--requests", "6", "--output-tokens", "8"),
        "trace": ("--trace", str(trace)),
    }
    with tiny_served(tmp_path) as served:
        for name, flags in loads.items():
            before = Scrape.of(served)
            report = bench(served, *flags)
            requests, tokens = report["requests"], report["tokens"]
            assert isinstance(requests, dict)
            assert isinstance(tokens, dict)
            assert requests["failed"] == requests["unfinished"] == 0, (name, report["errors"])
            assert requests["ok"] > 0
            _settled(served, before, requests["ok"])
            grown = Scrape.of(served) - before
            assert grown.total("inferd_requests_finished_total") == requests["ok"], name
            assert grown.total("vllm:request_success_total") == requests["ok"], name
            assert grown.total("vllm:prompt_tokens_total") == tokens["prompt"], name
            assert grown.total("vllm:generation_tokens_total") == tokens["output"], name
            assert grown.total("inferd_time_to_first_token_seconds_count") == requests["ok"], name
        assert report["requests"] == {"ok": len(jobs), "failed": 0, "unfinished": 0}
