"""PromQL, as much of it as the alert rules use: an expression becomes a tree, the tree a vector over recorded samples.

Owns the grammar and its meaning, after Prometheus' own (promql/engine.go, functions.go: extrapolated rates, a look-back
of five minutes). It must not know any rule. Enter at `parse`, then `evaluate` over a `Tape`.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Labels: TypeAlias = frozenset[tuple[str, str]]
Vector: TypeAlias = dict[Labels, float]
Points: TypeAlias = list[tuple[float, float]]  # (seconds, value), oldest first

_NAME: Final = "__name__"
_LOOK_BACK_SECONDS: Final = 300.0
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<string>"[^"]*")|(?P<duration>\d+[smhd])\b|(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)
    |(?P<word>[a-zA-Z_:][\w:]*)|(?P<sign>==|!=|>=|<=|=~|!~|[-+*/<>=(){}\[\],]))""",
    re.VERBOSE,
)
# How tightly each operator binds; of equals, the left one first.
_BINDS: Final = {
    "or": 1, "and": 2, "unless": 2, "==": 3, "!=": 3, ">": 3, "<": 3, ">=": 3, "<=": 3, "+": 4, "-": 4, "*": 5, "/": 5
}  # fmt: skip
_ARITHMETIC: Final[Mapping[str, Callable[[float, float], float]]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else (math.nan if not a or math.isnan(a) else math.copysign(math.inf, a)),
}
_COMPARISONS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
}
_SETS: Final = ("and", "or", "unless")
_SUMS: Final[Mapping[str, Callable[[list[float]], float]]] = {
    "sum": sum, "max": max, "min": min, "count": lambda values: float(len(values)),
    "avg": lambda values: sum(values) / len(values),
}  # fmt: skip
_OVER_TIME: Final[Mapping[str, Callable[[list[float]], float]]] = {
    "min_over_time": min, "max_over_time": max, "avg_over_time": _SUMS["avg"],
}  # fmt: skip


class PromqlError(ValueError):
    """An expression that is none, or that needs more of the language than there is here."""


@dataclass(slots=True)
class Tape:
    """Series and what was scraped of each. `pace`: how many times as fast as real time the rules run; their windows
    are divided by it."""

    pace: float = 1.0
    series: dict[Labels, Points] = field(default_factory=dict)

    def add(self, at: float, samples: Vector) -> None:
        """One scrape; a series that is no longer in it has ended (Prometheus' stale mark)."""
        for labels in self.series.keys() - samples.keys():
            if not math.isnan(self.series[labels][-1][1]):
                self.series[labels].append((at, math.nan))
        for labels, value in samples.items():
            self.series.setdefault(labels, []).append((at, value))


@dataclass(frozen=True, slots=True)
class Node:
    """`kind`: number | selector | call | sum | binary; the fields of other kinds are empty."""

    kind: str
    name: str = ""
    value: float = 0.0
    matchers: tuple[tuple[str, str, str], ...] = ()
    range_seconds: float = 0.0
    offset_seconds: float = 0.0
    parts: tuple["Node", ...] = ()
    grouping: str = ""  # by | without | on | ignoring
    labels: tuple[str, ...] = ()


def labels(name: str, **given: str) -> Labels:
    """A series' identity."""
    return frozenset({_NAME: name, **given}.items())


def parse(text: str) -> Node:
    """The tree of an expression. Raises PromqlError."""
    parser = _Parser(text)
    node = parser.expression()
    if parser.peek():
        raise PromqlError(f"not understood from {parser.peek()!r} on: {text}")
    return node


class _Parser:
    """A recursive descent, with binding powers for the operators."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0

    def peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def take(self, wanted: str = "") -> str:
        found = self.peek()
        if not found or (wanted and found != wanted):
            raise PromqlError(f"{found or 'the end'!r} where {wanted or 'more'!r} is due")
        self._at += 1
        return found

    def expression(self, least: int = 1) -> Node:
        left = self._operand()
        while _BINDS.get(self.peek(), 0) >= least:
            sign = self.take()
            grouping, named = self._grouping("on", "ignoring")
            right = self.expression(_BINDS[sign] + 1)
            left = Node("binary", sign, parts=(left, right), grouping=grouping, labels=named)
        return left

    def _operand(self) -> Node:
        token = self.take()
        if token == "(":
            inner = self.expression()
            self.take(")")
            return inner
        if token[0].isdigit():
            return Node("number", value=float(token))
        if token in _SUMS:
            grouping, named = self._grouping("by", "without")
            self.take("(")
            inner = self.expression()
            self.take(")")
            return Node("sum", token, parts=(inner,), grouping=grouping, labels=named)
        if self.peek() == "(":
            return Node("call", token, parts=self._arguments())
        return self._selector(token)

    def _arguments(self) -> tuple[Node, ...]:
        self.take("(")
        parts = [self.expression()]
        while self.peek() == ",":
            self.take()
            parts.append(self.expression())
        self.take(")")
        return tuple(parts)

    def _grouping(self, *words: str) -> tuple[str, tuple[str, ...]]:
        if self.peek() not in words:
            return "", ()
        word = self.take()
        self.take("(")
        named = []
        while self.peek() != ")":
            named.append(self.take())
            if self.peek() == ",":
                self.take()
        self.take(")")
        return word, tuple(named)

    def _selector(self, name: str) -> Node:
        matchers, range_seconds, offset_seconds = [], 0.0, 0.0
        if self.peek() == "{":
            self.take()
            while self.peek() != "}":
                label, sign, value = self.take(), self.take(), self.take()
                matchers.append((label, sign, value.strip('"')))
                if self.peek() == ",":
                    self.take()
            self.take("}")
        if self.peek() == "[":
            self.take()
            range_seconds = seconds(self.take())
            self.take("]")
        if self.peek() == "offset":
            self.take()
            offset_seconds = seconds(self.take())
        return Node("selector", name, 0.0, tuple(matchers), range_seconds, offset_seconds)


def _tokens(text: str) -> Iterator[str]:
    at, end = 0, len(text.rstrip())
    while at < end:
        found = _TOKEN.match(text, at)
        if found is None:
            raise PromqlError(f"not understood from {text[at : at + 20]!r} on")
        at = found.end()
        yield found.group().strip()


def seconds(duration: str) -> float:
    """A duration as the rules have it, e.g. 5m."""
    if not re.fullmatch(r"\d+[smhd]", duration):
        raise PromqlError(f"{duration!r} is no duration")
    return float(duration[:-1]) * _UNITS[duration[-1]]


def evaluate(node: Node, tape: Tape, now: float) -> Vector | float:
    """The value at an instant: a number, or a vector, empty where nothing holds. Raises PromqlError."""
    if node.kind == "number":
        return node.value
    if node.kind == "selector":
        return _instant(node, tape, now)
    if node.kind == "sum":
        return _aggregated(node, _vector(evaluate(node.parts[0], tape, now)))
    if node.kind == "call":
        return _called(node, tape, now)
    return _combined(node, evaluate(node.parts[0], tape, now), evaluate(node.parts[1], tape, now))


def _selected(node: Node, tape: Tape) -> Iterator[tuple[Labels, Points]]:
    for series, points in tape.series.items():
        named = dict(series)
        if named.get(_NAME) == node.name and all(_matches(named.get(m[0], ""), m[1], m[2]) for m in node.matchers):
            yield series, points


def _matches(value: str, sign: str, wanted: str) -> bool:
    same = re.fullmatch(wanted, value) is not None if "~" in sign else value == wanted
    return same != sign.startswith("!")


def _instant(node: Node, tape: Tape, now: float) -> Vector:
    at = now - node.offset_seconds / tape.pace
    found = {}
    for series, points in _selected(node, tape):
        last = next((point for point in reversed(points) if point[0] <= at), None)
        if last is not None and at - last[0] < _LOOK_BACK_SECONDS and not math.isnan(last[1]):
            found[series] = last[1]
    return found


def _called(node: Node, tape: Tape, now: float) -> Vector:
    if node.name == "histogram_quantile":
        share = evaluate(node.parts[0], tape, now)
        if not isinstance(share, float):
            raise PromqlError("the quantile must be a number")
        return _quantiles(share, _vector(evaluate(node.parts[1], tape, now)))
    inner = node.parts[0]
    if node.name not in ("rate", "increase", *_OVER_TIME) or not inner.range_seconds:
        raise PromqlError(f"{node.name} is not known here")
    end, length = now - inner.offset_seconds / tape.pace, inner.range_seconds / tape.pace
    found: Vector = {}
    for series, points in _selected(inner, tape):
        window = points[bisect_right(points, (end - length, math.inf)) : bisect_right(points, (end, math.inf))]
        inside = [point for point in window if not math.isnan(point[1])]
        if node.name in _OVER_TIME:
            if inside:
                found[_unnamed(series)] = _OVER_TIME[node.name]([value for _, value in inside])
        elif len(inside) > 1:
            grown = _increase(inside, end - length, end)
            found[_unnamed(series)] = grown / length if node.name == "rate" else grown
    return found


def _increase(points: Points, begin: float, end: float) -> float:
    """Of a counter, resets made up for, extrapolated to the edges of the window where the samples come near them."""
    grown, before = points[-1][1] - points[0][1], points[0][1]
    for _, value in points[1:]:
        grown += before if value < before else 0.0
        before = value
    sampled = points[-1][0] - points[0][0]
    mean = sampled / (len(points) - 1)
    to_begin, to_end = points[0][0] - begin, end - points[-1][0]
    to_begin = to_begin if to_begin < 1.1 * mean else mean / 2
    to_end = to_end if to_end < 1.1 * mean else mean / 2
    if grown > 0 and points[0][1] >= 0:
        to_begin = min(to_begin, sampled * points[0][1] / grown)  # a counter was never below zero
    return grown * (sampled + to_begin + to_end) / sampled


def _quantiles(share: float, buckets: Vector) -> Vector:
    grouped: dict[Labels, Points] = {}
    for series, value in buckets.items():
        named = dict(series)
        bound = math.inf if named.get("le") == "+Inf" else float(named.get("le", "nan"))
        rest = frozenset((k, v) for k, v in series if k not in ("le", _NAME))
        grouped.setdefault(rest, []).append((bound, value))
    return {rest: _quantile(share, sorted(found)) for rest, found in grouped.items()}


def _quantile(share: float, buckets: Points) -> float:
    """Linear within its bucket, as Prometheus has it; NaN without an observation."""
    total = buckets[-1][1]
    if buckets[-1][0] != math.inf or len(buckets) < 2 or not total > 0:
        return math.nan
    rank = share * total
    index = next(i for i, (_, count) in enumerate(buckets) if count >= rank)
    if index == len(buckets) - 1:
        return buckets[-2][0]
    low, before = (0.0, 0.0) if index == 0 else buckets[index - 1]
    high, count = buckets[index]
    return low + (high - low) * (rank - before) / (count - before)


def _aggregated(node: Node, vector: Vector) -> Vector:
    groups: dict[Labels, list[float]] = {}
    for series, value in vector.items():
        kept = frozenset((k, v) for k, v in _unnamed(series) if (k in node.labels) != (node.grouping == "without"))
        groups.setdefault(kept, []).append(value)
    return {series: _SUMS[node.name](values) for series, values in groups.items()}


def _combined(node: Node, left: Vector | float, right: Vector | float) -> Vector | float:
    sign = node.name
    if isinstance(left, float) and isinstance(right, float):
        return _ARITHMETIC[sign](left, right)
    if isinstance(right, float):
        return _applied(sign, ((s, v, v, right) for s, v in _vector(left).items()))
    if isinstance(left, float):
        return _applied(sign, ((s, v, left, v) for s, v in right.items()))
    key = _matching(node)
    others = {key(series): value for series, value in right.items()}
    if sign == "or":
        present = {key(series) for series in left}
        return {**left, **{series: value for series, value in right.items() if key(series) not in present}}
    if sign in _SETS:
        return {series: value for series, value in left.items() if (key(series) in others) == (sign == "and")}
    pairs = ((series, value, value, others[key(series)]) for series, value in left.items() if key(series) in others)
    return _applied(sign, pairs)


def _applied(sign: str, pairs: Iterator[tuple[Labels, float, float, float]]) -> Vector:
    """`pairs`: series, the value that a comparison keeps, and both sides."""
    if sign in _COMPARISONS:
        return {series: kept for series, kept, a, b in pairs if _COMPARISONS[sign](a, b)}
    return {_unnamed(series): _ARITHMETIC[sign](a, b) for series, _, a, b in pairs}


def _matching(node: Node) -> Callable[[Labels], Labels]:
    """What of a series' labels two sides must have in common."""
    if node.grouping == "on":
        return lambda series: frozenset((k, v) for k, v in series if k in node.labels)
    return lambda series: frozenset((k, v) for k, v in series if k != _NAME and k not in node.labels)


def _unnamed(series: Labels) -> Labels:
    return frozenset((k, v) for k, v in series if k != _NAME)


def _vector(value: Vector | float) -> Vector:
    if isinstance(value, float):
        raise PromqlError("a vector is due, not a number")
    return value
