"""A real Prometheus (Debian's package) that scrapes one target and is asked what it knows.

`scraping(target, folder)` starts it on a free port with our alert rules and exemplars on, and ends it. Not a fake, in
spite of the folder: what it cannot parse or query, no user's Prometheus can. It looks at a new target after five
seconds (its own clock for discovery), so share one among tests. Enter at `scraping`.
"""

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).resolve().parents[2] / "telemetry" / "prometheus" / "rules"
INTERVAL = "200ms"


@dataclass(frozen=True)
class Prometheus:
    """One running server at `url`; `at`: the moment (Unix seconds) that instant queries are about, else now."""

    url: str
    at: float | None = None

    def as_of(self, selector: str) -> "Prometheus":
        """The same, as of the newest scrape that has this series. On a busy machine the next one may come too late, and
        then no series of its target has a value any more."""
        found: list[tuple[dict[str, str], float]] = []
        until(lambda: found.extend(self.query(f"timestamp({selector})")) or found)
        return replace(self, at=found[0][1])

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of the HTTP API. Raises AssertionError with its words for an error."""
        asked = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of every series of an instant query."""
        found = self.get("query", query=expression, **({} if self.at is None else {"time": str(self.at)}))
        assert found["resultType"] == "vector", found
        return [(series["metric"], float(series["value"][1])) for series in found["result"]]

    def one(self, expression: str) -> float:
        """The value of the only series. Raises ValueError if there is not exactly one."""
        [(_, value)] = self.query(expression)
        return value


def until(holds: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait for what Prometheus will know after its next scrape. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("Prometheus did not come to know it")
        time.sleep(0.05)


@contextmanager
def scraping(target: str, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes `target` (host:port), once it answers. Skips the test where it is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is missing: apt-get install prometheus")
    config = {
        "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": [f"{RULES}/*.yml"],
        "scrape_configs": [{"job_name": "inferd", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    log = folder / "log"
    options = [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--enable-feature=exemplar-storage",
    ]
    with log.open("w") as output:
        process = subprocess.Popen([program, *options], stdout=output, stderr=output)
    try:
        until(lambda: process.poll() is not None or "ready to receive" in log.read_text())
        address = re.search(r'msg="Listening on" address=(\S+)', log.read_text())
        assert address is not None, log.read_text()
        yield Prometheus(f"http://{address[1]}")
    finally:
        process.kill()
        process.wait(timeout=60)
