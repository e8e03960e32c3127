"""Lines of styled text, and how figures are written: the one form in which everything here is shown.

Owns the `Line` (spans of text and style name), its arithmetic in terminal cells, and the notation of times, bytes and
counts; a figure that is not reported is `–`, never 0. It must not know Textual: `top --once` prints the same lines.
Enter at `line`, `fit`, `beside` and the notations.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

Span: TypeAlias = tuple[str, str]  # text, style name (tui/palette.py)
Line: TypeAlias = tuple[Span, ...]

UNKNOWN: Final = "–"
NOT_REPORTED: Final = "not reported"
_KIB: Final = 1024
# Where width is not one cell: combining marks, zero-width signs, and all from Hangul Jamo on but symbols and blocks.
_ODD: Final = re.compile(
    "[\u0300-\u036f\u0483-\u0489\u0591-\u10ff\u1100-\u1fff\u200b-\u200f\u20d0-\u20f0\u231a\u231b\u2329\u232a\u23e9-\u23f3"
    "\u25fd\u25fe\u2614-\u27bf\u2b1b-\U0010ffff]"
)


def line(*parts: str | Span) -> Line:
    """Plain strings and (text, style) spans as one line."""
    spans = ((part, "") if isinstance(part, str) else part for part in parts)
    return tuple(span for span in spans if span[0])


def cells(text: str) -> int:
    """Width in terminal cells: wide characters take two, combining ones none."""
    if text.isascii() or not _ODD.search(text):
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def width_of(spans: Line) -> int:
    return sum(cells(text) for text, _ in spans)


def clip(text: str, width: int) -> str:
    """At most `width` cells; what was cut is shown by `…`. Control characters, which a terminal would obey, go."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    if cells(text) <= width:
        return text
    kept, used = [], 0
    for char in text:
        used += cells(char)
        if used > width - 1:
            break
        kept.append(char)
    return "".join(kept) + "…" if width > 0 else ""


def fit(spans: Line, width: int) -> Line:
    """Exactly `width` cells: padded on the right, or clipped."""
    shown: list[Span] = []
    left = width
    for text, style in spans:
        cut = clip(text, left)
        if cut:
            shown.append((cut, style))
        left -= cells(cut)
        if left <= 0:
            return tuple(shown)
    return (*shown, (" " * left, ""))


def pad(text: str, width: int) -> str:
    """Left-aligned in exactly `width` cells."""
    text = clip(text, width)
    return text + " " * (width - cells(text))


def right(text: str, width: int) -> str:
    """Right-aligned in exactly `width` cells."""
    text = clip(text, width)
    return " " * (width - cells(text)) + text


def rule(title: str, width: int, note: str = "") -> Line:
    """A panel's title: `── title ───── note ──`."""
    title, note = clip(title, width - 6), clip(note, max(0, width - cells(title) - 10))
    tail = f" {note} " if note else ""
    dashes = "─" * max(0, width - cells(title) - 4 - cells(tail) - (2 if note else 0))
    return line(
        ("── ", "rule"), (title, "title"), (f" {dashes}", "rule"), (tail, "label"), ("──" if note else "", "rule")
    )


def beside(left: Sequence[Line], other: Sequence[Line], left_width: int, gap: int = 2) -> list[Line]:
    """Two blocks side by side; the first is fitted to `left_width`."""
    height = max(len(left), len(other))
    empty: Line = ()
    return [
        (
            *fit(left[row] if row < len(left) else empty, left_width),
            (" " * gap, ""),
            *(other[row] if row < len(other) else empty),
        )
        for row in range(height)
    ]


def wrapped(parts: Iterable[Line], width: int, between: str = "  ", indent: int = 1) -> list[Line]:
    """As many parts a line as fit, none broken unless it is alone too wide."""
    lines: list[Line] = []
    row: list[Span] = [(" " * indent, "")]
    used = indent
    for part in parts:
        size = width_of(part)
        if used > indent and used + len(between) + size > width:
            lines.append(tuple(row))
            row, used = [(" " * indent, "")], indent
        if used > indent:
            row.append((between, ""))
            used += len(between)
        row.extend(part)
        used += size
    return [*lines, tuple(row)] if used > indent else lines


def plain(spans: Line) -> str:
    """Without styles and without blanks at the end."""
    return "".join(text for text, _ in spans).rstrip()


def duration(value_s: float | None) -> str:
    """Three digits and a unit: 870 µs, 12.3 ms, 1.24 s, 12m05s, 3h02m, 5d04h."""
    if value_s is None:
        return UNKNOWN
    if value_s <= 0:
        return "0 s"
    if value_s < 0.0009995:
        return f"{value_s * 1e6:.0f} µs"
    if value_s < 0.9995:
        return f"{_three(value_s * 1e3)} ms"
    if value_s < 99.5:
        return f"{_three(value_s)} s"
    seconds = round(value_s)
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02}h"


def age(value_ns: int | None) -> str:
    """Whole seconds: how long something has been so."""
    if value_ns is None:
        return UNKNOWN
    return f"{value_ns // 1_000_000_000} s" if value_ns < 99_500_000_000 else nanoseconds(value_ns)


def nanoseconds(value_ns: int | None) -> str:
    return duration(None if value_ns is None else value_ns / 1e9)


def _three(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def size(value_bytes: int | None) -> str:
    """Bytes in binary units, three digits."""
    if value_bytes is None:
        return UNKNOWN
    if abs(value_bytes) < _KIB:
        return f"{value_bytes} B"
    amount, units = float(value_bytes), iter(("KiB", "MiB", "GiB", "TiB"))
    unit = "B"
    while abs(amount) >= 999.5 and (following := next(units, None)):
        amount, unit = amount / _KIB, following
    sign = "-" if amount < 0 else ""
    return f"{sign}{_three(abs(amount))} {unit}"


def count(value: float | None) -> str:
    """Whole numbers with thousands marked; from a million on, in millions."""
    if value is None:
        return UNKNOWN
    if abs(value) >= 1e7:
        return f"{value / 1e6:,.1f} M"
    return f"{value:,.0f}"


def rate(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """A share of 1. What is there, but under half a percent, is not 0."""
    if share is None:
        return UNKNOWN
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def clock(unix_seconds: float | None) -> str:
    """Time of day, UTC: daemons, dashboards and people are seldom in one time zone."""
    if unix_seconds is None:
        return UNKNOWN
    seconds = int(unix_seconds) % 86400
    return f"{seconds // 3600:02}:{seconds % 3600 // 60:02}:{seconds % 60:02}"
