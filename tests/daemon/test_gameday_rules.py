"""The alert rules as game day runs them: on promtool's own cases they fire where promtool says so."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.gameday import promql
from daemon.gameday.rules import RULES, Watch, read, scraped, total

ALERTS = read()
CASES: list[dict[str, Any]] = [
    case
    for file in sorted((RULES.parent / "rule_tests").glob("*.yml"))
    for case in yaml.safe_load(Path(file).read_text())["tests"]
]


def values(written: str) -> list[float]:
    """promtool's notation: 1 2, 1x3 (thrice more), 0+30x4, _ (no sample), stale."""
    found: list[float] = []
    for word in written.split():
        run = re.fullmatch(r"(-?[\d.]+)(?:([+-][\d.]+))?x(\d+)", word)
        if run:
            found += [float(run[1]) + float(run[2] or 0) * i for i in range(int(run[3]) + 1)]
        elif blank := re.fullmatch(r"_(?:x(\d+))?", word):
            found += [math.nan] * (int(blank[1]) if blank[1] else 1)
        else:
            found.append(math.nan if word == "stale" else float(word))
    return found


def series(written: str) -> promql.Labels:
    name, _, rest = written.partition("{")
    return promql.labels(name, **dict(re.findall(r'(\w+)="([^"]*)"', rest)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_rules_fire_where_promtool_says(case: dict[str, Any]) -> None:
    step = promql.seconds(case["interval"])
    given = {series(s["series"]): values(str(s["values"])) for s in case["input_series"]}
    looks = {
        promql.seconds(test["eval_time"]): {
            name for sample in test["exp_samples"] for name in re.findall(r'alertname="(\w+)"', sample["labels"])
        }
        for test in case.get("promql_expr_test", ())
    }
    watch, every = Watch(ALERTS), 30.0
    for tick in range(int(max(looks, default=0.0) / every) + 1):
        now = every * tick
        if not now % step:
            index = int(now / step)
            watch.tape.add(now, {s: v[index] for s, v in given.items() if index < len(v) and not math.isnan(v[index])})
        firing = watch.look(now)
        if now in looks:
            assert firing == looks[now]


def test_a_faster_pace_shortens_windows_and_waits_alone() -> None:
    rule = {name: ALERTS[name] for name in ("InferdRepeatedOom", "InferdDown")}
    watch = Watch(rule, pace=30.0)
    oom = promql.labels("inferd_oom_total", cause="leak")
    down = promql.labels("up", job="inferd")
    for now, count in ((0.0, 0.0), (1.0, 1.0), (2.0, 1.0)):
        watch.tape.add(now, {oom: count, down: 0.0})
        assert "InferdRepeatedOom" not in watch.look(now)
    watch.tape.add(3.0, {oom: 2.0, down: 0.0})
    assert watch.look(3.0) == {"InferdRepeatedOom", "InferdDown"}
    watch.tape.add(90.0, {oom: 2.0, down: 1.0})
    assert watch.look(90.0) == set(), "the window of half an hour is a minute here"


def test_what_is_not_understood_is_said() -> None:
    for text in ("rate(x)", "topk(3, x)", "x[5m", "x and", "x ~ 3"):
        with pytest.raises(promql.PromqlError):
            tape = promql.Tape()
            tape.add(0.0, {promql.labels("x"): 1.0})
            promql.evaluate(promql.parse(text), tape, 0.0)


def test_a_scrape_is_read_and_summed() -> None:
    text = '# TYPE a_total counter\na_total{cause="x",model="m"} 2\na_total{cause="y",model="m"} 3\n'
    assert total(scraped(text), "a_total") == 5
    assert total(scraped(text), 'a_total{cause="y"}') == 3
    assert math.isnan(total(scraped(text), "b_total"))
