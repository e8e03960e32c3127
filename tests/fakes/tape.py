"""What a daemon exposed while something happened to it, played to the real alert rules by the real promtool.

A `Tape` asks a daemon for its metrics again and again. `Tape.play` gives what it saw, stretched to a span of minutes,
to promtool with the rules as they are shipped, windows and `for` included: the alert must fire by the end of the span
and of its own `for`, and be silent again after hours in which nothing happens. So a fault of seconds is judged by rules
made for minutes, and a busy machine moves nothing. Enter at `Tape`.
"""

import http.client
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.fakes import promql

RULES = Path(__file__).resolve().parents[2] / "telemetry" / "prometheus" / "rules"
EVERY_S = 0.25
STEP_S = 15  # of the played time: one sample
QUIET_STEPS = 4 * 3600 // STEP_S
_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_UP = 'up{job="inferd",instance="drilled"}'
Sample = dict[str, float]


def rules() -> dict[str, dict[str, Any]]:
    """Every alert by name."""
    files = [yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yml"))]
    return {rule["alert"]: rule for file in files for group in file["groups"] for rule in group["rules"]}


class Tape:
    """`scrape` returns an exposition, or raises OSError while nobody answers. Keeps what `alerts` read."""

    def __init__(self, scrape: Callable[[], str], alerts: set[str], folder: Path) -> None:
        self._scrape = scrape
        known = rules()
        self._reads = {name: promql.read(known[name]["expr"]).names for name in alerts}
        self._for_s = {name: _seconds(known[name].get("for", "0s")) for name in alerts}
        self._names = set().union(*self._reads.values())
        self._folder = folder
        self._samples: list[Sample] = [self._look()]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def now(self) -> int:
        """A place on the tape: the moment before whatever is begun after this call."""
        self._samples.append(self._look())
        return len(self._samples) - 1

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)

    def play(self, alert: str, begun: int, minutes: int) -> None:
        """Raises AssertionError, with what promtool says, unless `alert` fires within `minutes`, into which all since
        `begun` is stretched, and its `for`; or if it has not ended hours later."""
        end = self.now() + 1
        count = minutes * 60 // STEP_S
        seen = [self._samples[begun + place * (end - 1 - begun) // (count - 1)] for place in range(count)]
        given = [
            {"series": name, "values": " ".join([_text(each.get(name)) for each in seen] + [_rest(seen[-1].get(name))])}
            for name in sorted(set().union(*seen))
            if name.partition("{")[0] in self._reads[alert]
        ]
        fired = f'clamp_max(count(count_over_time(ALERTS{{alertname="{alert}",alertstate="firing"}}[1d])), 1)'
        case = {
            "rule_files": [str(path) for path in sorted(RULES.glob("*.yml"))],
            "evaluation_interval": f"{STEP_S}s",
            "tests": [
                {
                    "interval": f"{STEP_S}s",
                    "input_series": given,
                    "promql_expr_test": [
                        _expected(fired, 0, []),
                        _expected(fired, (count + 1) * STEP_S + self._for_s[alert], [{"labels": "{}", "value": 1}]),
                        _expected(f'ALERTS{{alertname="{alert}"}}', (count + QUIET_STEPS) * STEP_S, []),
                    ],
                }
            ],
        }
        file = self._folder / f"{alert}-{begun}.yml"
        file.write_text(yaml.safe_dump(case, width=10**6))
        done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"{alert}: {done.stdout}{done.stderr}\n{file}"

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self._samples.append(self._look())

    def _look(self) -> Sample:
        sample = {_UP: 0.0}
        try:
            lines = self._scrape().splitlines()
        except (OSError, http.client.HTTPException):
            return sample
        for line in lines:
            found = _SAMPLE.match(line)
            if found and found[1] in self._names:
                labels = ",".join(filter(None, (found[2], 'job="inferd"', 'instance="drilled"')))
                sample[f"{found[1]}{{{labels}}}"] = float(found[3])
        return sample | {_UP: 1.0}


def _seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def _text(value: float | None) -> str:
    return "_" if value is None else repr(value)


def _rest(value: float | None) -> str:
    """The same again, for hours."""
    return f"_x{QUIET_STEPS}" if value is None else f"{value!r}x{QUIET_STEPS}"


def _expected(expression: str, at_s: int, samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"expr": expression, "eval_time": f"{at_s}s", "exp_samples": samples}
