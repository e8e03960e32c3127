"""Plots as inline SVG: lines over time, stacked areas, histograms, clouds of points, intervals. Pure.

Owns coordinates and marks; colours are CSS classes of the page (daemon/lab/page.py). It must not know what is plotted.
Enter at `lines`, `stack`, `bars`, `cloud` or `intervals`; each returns one `<svg>` element that needs nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, isfinite, log10

WIDTH, HEIGHT = 760, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 12, 28
_MOST_POINTS = 1200  # more than the pixels there are
COLOURS = 8  # classes c0 … c7

Points = Sequence[tuple[float, float | None]]
Form = Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`step`: it keeps its value until the next point, as a limit does. `dashed`: a bound, not a measurement."""

    name: str
    points: Points
    step: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at `x`."""

    x: float
    text: str


def plain(value: float) -> str:
    """1234567 → 1.23M; 0.00123 → 0.00123."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that span [low, high]."""
    span = high - low
    if span <= 0 or not isfinite(span):
        return [low]
    raw = span / count
    magnitude = 10.0 ** floor(log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if raw <= m * magnitude)
    first = ceil(low / step - 1e-9)
    return [n * step for n in range(first, floor(high / step + 1e-9) + 1)]


@dataclass(slots=True)
class _Axes:
    """A frame with scales; collects elements."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    parts: list[str] = field(default_factory=list)
    height: int = HEIGHT

    def x(self, value: float) -> float:
        span = (self.x_high - self.x_low) or 1.0
        return _LEFT + (value - self.x_low) / span * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        span = (self.y_high - self.y_low) or 1.0
        return self.height - _BOTTOM - (value - self.y_low) / span * (self.height - _TOP - _BOTTOM)

    def grid(self, x_form: Form, y_form: Form, x_label: str) -> None:
        for value in ticks(self.y_low, self.y_high):
            at = self.y(value)
            self.parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            self.parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}">{escape(y_form(value))}</text>')
        base = self.height - _BOTTOM
        for value in ticks(self.x_low, self.x_high, 8):
            at = self.x(value)
            self.parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 4}"/>')
            self.parts.append(f'<text class="tick mid" x="{at:.1f}" y="{base + 17}">{escape(x_form(value))}</text>')
        self.parts.append(f'<text class="tick" x="{WIDTH - _RIGHT}" y="{self.height - 1}">{escape(x_label)}</text>')

    def marks(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            at = self.x(mark.x)
            if _LEFT <= at <= WIDTH - _RIGHT:
                self.parts.append(
                    f'<g class="mark"><line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{self.height - _BOTTOM}"/>'
                    f'<circle cx="{at:.1f}" cy="{_TOP}" r="4"/><title>{escape(mark.text)}</title></g>'
                )

    def done(self, title: str) -> str:
        return (
            f'<svg role="img" viewBox="0 0 {WIDTH} {self.height}" aria-label="{escape(title, quote=True)}">'
            + "".join(self.parts)
            + "</svg>"
        )


def thinned(points: Points, most: int = _MOST_POINTS) -> list[tuple[float, float | None]]:
    """At most about `most` points; of each stretch its least and its largest stay, so that no peak is lost."""
    if len(points) <= most:
        return list(points)
    size = -(-len(points) * 2 // most)
    kept: list[tuple[float, float | None]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        known = [p for p in part if p[1] is not None]
        if not known:
            kept.append(part[0])
            continue
        ends = {min(known, key=lambda p: p[1] or 0), max(known, key=lambda p: p[1] or 0)}
        kept += sorted(ends, key=lambda p: p[0])
    return kept


def _bounds(values: Sequence[float], zero: bool = True) -> tuple[float, float]:
    low, high = min(values), max(values)
    low = min(0.0, low) if zero else low
    return low, high + (high - low) * 0.05 or 1.0


def lines(title: str, drawn: Sequence[Line], marks: Sequence[Mark] = (), form: Form = plain) -> str:
    """Lines over seconds; empty if there is nothing to draw."""
    known = [(x, y) for line in drawn for x, y in line.points if y is not None]
    if not known:
        return ""
    low, high = _bounds([y for _, y in known])
    axes = _Axes(min(x for x, _ in known), max(x for x, _ in known), low, high)
    axes.grid(plain, form, "s")
    for index, line in enumerate(drawn):
        path = _path(axes, thinned(line.points), line.step)
        if path:
            dashed = " dashed" if line.dashed else ""
            axes.parts.append(
                f'<path class="line s{index % COLOURS}{dashed}" d="{path}"><title>{escape(line.name)}</title></path>'
            )
    axes.marks(marks)
    return axes.done(title) + _legend([(line.name, index, line.dashed) for index, line in enumerate(drawn)])


def _path(axes: _Axes, points: Points, step: bool) -> str:
    words: list[str] = []
    before: float | None = None
    for x, y in points:
        if y is None:
            before = None
            continue
        at_x, at_y = axes.x(x), axes.y(y)
        if before is None:
            words.append(f"M{at_x:.1f} {at_y:.1f}")
        elif step:
            words.append(f"H{at_x:.1f}V{at_y:.1f}")
        else:
            words.append(f"L{at_x:.1f} {at_y:.1f}")
        before = at_y
    return "".join(words)


def stack(title: str, layers: Sequence[Line], bounds: Sequence[Line], marks: Sequence[Mark], form: Form) -> str:
    """Areas on top of each other over the same x, the first at the bottom; `bounds` are lines across."""
    layers = [layer for layer in layers if any(y for _, y in layer.points)]
    if not layers:
        return ""
    xs = [x for x, _ in layers[0].points]
    tops = [0.0] * len(xs)
    shapes = []
    for layer in layers:
        bases, tops = tops, [base + (y or 0.0) for base, (_, y) in zip(tops, layer.points, strict=True)]
        shapes.append((bases, tops))
    high = max([*tops, *(y for bound in bounds for _, y in bound.points if y is not None)])
    axes = _Axes(xs[0], xs[-1], 0.0, high * 1.05 or 1.0)
    axes.grid(plain, form, "s")
    for index, (layer, (bases, above)) in enumerate(zip(layers, shapes, strict=True)):
        upper = [f"{axes.x(x):.1f} {axes.y(y):.1f}" for x, y in zip(xs, above, strict=True)]
        lower = [f"{axes.x(x):.1f} {axes.y(y):.1f}" for x, y in zip(xs, bases, strict=True)]
        axes.parts.append(
            f'<path class="area f{index % COLOURS}" d="M{"L".join(upper)}L{"L".join(reversed(lower))}Z">'
            f"<title>{escape(layer.name)}</title></path>"
        )
    for bound in bounds:
        path, name = _path(axes, bound.points, False), escape(bound.name)
        axes.parts.append(f'<path class="line bound" d="{path}"><title>{name}</title></path>')
    axes.marks(marks)
    return axes.done(title) + _legend([(layer.name, index, False) for index, layer in enumerate(layers)])


def bars(title: str, edges: Sequence[tuple[float, float]], form: Form, x_label: str) -> str:
    """A histogram: (upper edge, count) in order, drawn side by side, since edges may lie on any scale."""
    if not any(count for _, count in edges):
        return ""
    axes = _Axes(0.0, float(len(edges)), 0.0, max(count for _, count in edges) * 1.05)
    every = -(-len(edges) // 10)
    labels = {index + 1: edge for index, (edge, _) in enumerate(edges) if index % every == every - 1}
    for value in ticks(0.0, axes.y_high):
        at = axes.y(value)
        axes.parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        axes.parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}">{plain(value)}</text>')
    base = HEIGHT - _BOTTOM
    for index, (edge, count) in enumerate(edges):
        left, right, top = axes.x(index), axes.x(index + 1), axes.y(count)
        axes.parts.append(
            f'<rect class="f0" x="{left + 0.5:.1f}" y="{top:.1f}" width="{right - left - 1:.1f}" '
            f'height="{base - top:.1f}"><title>up to {escape(form(edge))}: {count:.0f}</title></rect>'
        )
    for index, edge in labels.items():
        axes.parts.append(f'<text class="tick" x="{axes.x(index):.1f}" y="{base + 17}">{escape(form(edge))}</text>')
    axes.parts.append(f'<text class="tick" x="{WIDTH - _RIGHT}" y="{HEIGHT - 1}">{escape(x_label)}</text>')
    return axes.done(title)


def cloud(title: str, groups: dict[str, Sequence[tuple[float, float]]], form: Form, x_label: str) -> str:
    """One point a pair, a colour a group."""
    pairs = [pair for group in groups.values() for pair in group]
    if not pairs:
        return ""
    low, high = _bounds([y for _, y in pairs])
    x_low, x_high = _bounds([x for x, _ in pairs])
    axes = _Axes(x_low, x_high, low, high)
    axes.grid(plain, form, x_label)
    for index, group in enumerate(groups.values()):
        every = -(-len(group) // _MOST_POINTS) or 1
        axes.parts += [
            f'<circle class="dot f{index % COLOURS}" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="2.5"/>'
            for x, y in group[::every]
        ]
    return axes.done(title) + _legend([(name, index, False) for index, name in enumerate(groups)])


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio with its interval; `tone` is a class: good, bad or quiet."""

    name: str
    middle: float
    low: float
    high: float
    tone: str


_RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_MOST_TICKS = 8


def intervals(title: str, rows: Sequence[Interval]) -> str:
    """Ratios around 1 on a logarithmic scale, one row each: a forest plot. An interval much wider than the ratios lie
    apart is cut at the edge, so that one of them does not hide all others."""
    if not rows:
        return ""
    middles = [row.middle for row in rows]
    low = max(min([0.9, *(r.low for r in rows)]), min(0.9, *middles) / 1.5)
    high = min(max([1.1, *(r.high for r in rows)]), max(1.1, *middles) * 1.5)
    axes = _Axes(log10(low), log10(high), 0.0, float(len(rows)), height=34 + 22 * len(rows))
    left = 250
    scale = (WIDTH - _RIGHT - left) / (log10(high) - log10(low))

    def x(value: float) -> float:
        return left + (log10(min(high, max(low, value))) - log10(low)) * scale

    base = axes.height - _BOTTOM
    inside = [value for value in _RATIOS if low <= value <= high]
    while len(inside) > _MOST_TICKS:
        inside = [value for n, value in enumerate(inside) if value == 1 or n % 2 == inside.index(1.0) % 2]
    for value in inside:
        axes.parts.append(f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{_TOP}" y2="{base}"/>')
        axes.parts.append(f'<text class="tick mid" x="{x(value):.1f}" y="{base + 17}">{value:.3g} ×</text>')
    axes.parts.append(f'<line class="line bound" x1="{x(1):.1f}" x2="{x(1):.1f}" y1="{_TOP}" y2="{base}"/>')
    for index, row in enumerate(rows):
        at = _TOP + 11 + index * 22
        axes.parts.append(
            f'<g class="{row.tone}"><text class="tick" x="{left - 10}" y="{at + 4}">{escape(row.name)}</text>'
            f'<line class="whisker" x1="{x(row.low):.1f}" x2="{x(row.high):.1f}" y1="{at}" y2="{at}"/>'
            f'<circle cx="{x(row.middle):.1f}" cy="{at}" r="5"/>'
            f"<title>{escape(row.name)}: {row.middle:.3f} × ({row.low:.3f} to {row.high:.3f})</title></g>"
        )
    return axes.done(title)


def _legend(entries: Sequence[tuple[str, int, bool]]) -> str:
    keys = "".join(
        f'<span><i class="k{index % COLOURS}{" hollow" if hollow else ""}"></i>{escape(name)}</span>'
        for name, index, hollow in entries
    )
    return f'<div class="legend">{keys}</div>'
