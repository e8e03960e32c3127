"""The alert rules that are shipped, and what they say of a daemon that is scraped here instead of by Prometheus.

Owns reading the rule files, and how long a rule must hold before it fires. It must not know any drill. Enter at
`read`, then `Watch`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from daemon.gameday import promql

RULES: Final = Path(__file__).resolve().parents[2] / "telemetry" / "prometheus" / "rules"


@dataclass(frozen=True, slots=True)
class Rule:
    """One alert. `wait_seconds`: how long `tree` must hold; `runbook` is where it leads."""

    name: str
    text: str
    tree: promql.Node
    wait_seconds: float
    runbook: str


def read(folder: Path = RULES) -> dict[str, Rule]:
    """Every alert by its name."""
    import yaml

    found = {}
    for file in sorted(folder.glob("*.yml")):
        content: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
        for group in content["groups"]:
            for rule in group["rules"]:
                name, text = str(rule["alert"]), " ".join(str(rule["expr"]).split())
                wait = promql.seconds(str(rule.get("for", "0s")))
                found[name] = Rule(name, text, promql.parse(text), wait, str(rule["annotations"]["runbook"]))
    return found


class Watch:
    """Rules over one tape. `pace`: how many times as fast as real time they run: a window of five minutes and a wait
    of one are 300 and 60 divided by it; what a rule compares with is not changed."""

    def __init__(self, rules: Mapping[str, Rule], pace: float = 1.0) -> None:
        self._rules = rules
        self._pace = pace
        self.tape = promql.Tape(pace)
        self._since: dict[tuple[str, promql.Labels], float] = {}

    def look(self, now: float) -> set[str]:
        """The alerts that fire at this instant. To be asked again and again: some must hold for a while."""
        firing, pending = set(), {}
        for rule in self._rules.values():
            value = promql.evaluate(rule.tree, self.tape, now)
            for series in value if isinstance(value, dict) else ():
                key = (rule.name, series)
                pending[key] = self._since.get(key, now)
                if now - pending[key] >= rule.wait_seconds / self._pace:
                    firing.add(rule.name)
        self._since = pending
        return firing


def scraped(exposition: str) -> promql.Vector:
    """The samples of a scrape, with the labels that Prometheus' own configuration adds."""
    found: promql.Vector = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            found[promql.labels(sample.name, **sample.labels, **TARGET)] = float(sample.value)
    return found


TARGET: Final[Mapping[str, str]] = {"job": "inferd", "instance": "scratch"}


def up(alive: bool) -> promql.Vector:
    """What Prometheus notes of the scrape itself."""
    return {promql.labels("up", **TARGET): float(alive)}


def total(samples: promql.Vector, series: str) -> float:
    """The sum of the samples that `series`, a name or one with labels, selects; NaN if there is none."""
    tape = promql.Tape()
    tape.add(0.0, samples)
    value = promql.evaluate(promql.parse(series), tape, 0.0)
    found = [each for each in value.values() if not math.isnan(each)] if isinstance(value, dict) else [value]
    return sum(found) if found else math.nan
