"""Reads a PromQL expression as far as tests need it: which metrics it selects, by which labels, and how it groups.

Whether the expression is valid is promtool's to say; this only has to understand valid ones. Enter at `read`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from telemetry.metric import Metric

_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)|(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<range>\[[^\]]*\])"""
    r"""|(?P<name>[a-zA-Z_:][\w:]*)|(?P<number>[\d.]+\w*)|(?P<mark>=~|!~|!=|==|>=|<=|[^\s\w])"""
)
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "offset", "bool", "inf", "nan", "atan2"}
# What Prometheus itself adds to every series that it scrapes, or makes of rules.
SCRAPED = {"job", "instance"}
OWN_SERIES = {"up": set[str](), "ALERTS": {"alertname", "alertstate", "severity"}}


@dataclass(frozen=True)
class Selector:
    """`name{label op value, …}` as it stands; `matchers` maps a label to its pattern, whatever the operator."""

    name: str
    matchers: dict[str, str]
    text: str


@dataclass(frozen=True)
class Expression:
    """The selectors in order, and every label that an aggregation or a matching names."""

    selectors: tuple[Selector, ...]
    grouping: frozenset[str]

    @property
    def names(self) -> set[str]:
        return {selector.name for selector in self.selectors}


def read(text: str) -> Expression:
    """Take `text` apart. Raises ValueError for what is no PromQL at all."""
    tokens, at = list(_tokens(text)), 0
    selectors: list[Selector] = []
    grouping: set[str] = set()
    while at < len(tokens):
        kind, token = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        at += 1
        if kind != "name" or token in _WORDS:
            continue
        if token in _GROUPING:
            if following == "(":
                end = tokens.index(("mark", ")"), at)
                grouping |= {word for word_kind, word in tokens[at:end] if word_kind == "name"}
                at = end
        elif following == "{":
            end = tokens.index(("mark", "}"), at)
            inside = [word for _, word in tokens[at + 1 : end] if word != ","]
            matchers = {inside[i]: inside[i + 2][1:-1] for i in range(0, len(inside), 3)}
            selectors.append(Selector(token, matchers, token + "".join(word for _, word in tokens[at : end + 1])))
            at = end
        elif following != "(" and following not in _GROUPING:
            selectors.append(Selector(token, {}, token))
    return Expression(tuple(selectors), frozenset(grouping))


def series(metrics: list[Metric]) -> dict[str, dict[str, tuple[str, ...] | None]]:
    """Every sample name that the rows can expose, with its labels and their closed values (None: open)."""
    found: dict[str, dict[str, tuple[str, ...] | None]] = {}
    for metric in metrics:
        model = "model_name" if metric.name.startswith("vllm:") else "model"
        labels = {**dict.fromkeys((model, "engine", *SCRAPED)), **metric.labels}
        if metric.kind == "histogram":
            found[f"{metric.name}_bucket"] = {**labels, "le": None}
            found[f"{metric.name}_sum"] = found[f"{metric.name}_count"] = labels
        else:
            found[f"{metric.name}_total" if metric.kind == "counter" else metric.name] = labels
    for name, own in OWN_SERIES.items():
        found[name] = dict.fromkeys((*own, *SCRAPED))
    return found


def faults(text: str, known: dict[str, dict[str, tuple[str, ...] | None]]) -> list[str]:
    """What `text` names that is not exposed: metrics, labels, values of closed labels."""
    expression = read(text)
    wrong = [f"no metric {name}" for name in sorted(expression.names - known.keys())]
    selected = [selector for selector in expression.selectors if selector.name in known]
    for selector in selected:
        labels = known[selector.name]
        for label, pattern in selector.matchers.items():
            if label not in labels:
                wrong.append(f"{selector.name} has no label {label}")
            elif (closed := labels[label]) and re.fullmatch(r"[\w|]+", pattern):
                wrong += [f"{label} is never {value}" for value in pattern.split("|") if value not in closed]
    anywhere = {label for selector in selected for label in known[selector.name]}
    return wrong + [f"no metric here has the label {label}" for label in sorted(expression.grouping - anywhere)]


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or found.lastgroup is None:
            raise ValueError(f"not PromQL at {text[at : at + 20]!r}")
        if found.lastgroup != "skip":
            yield found.lastgroup, found.group()
        at = found.end()
