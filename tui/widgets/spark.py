"""Live lines: a sparkline of one row, and a chart of several rows in braille dots that overlays a few series.

Pure: values in, lines out. A value that was not reported (None) leaves a gap, never a zero. Enter at `spark`, `chart`.
"""

from collections.abc import Callable, Sequence
from typing import Final

from tui.text import Line, Span, pad, right

_BARS: Final = "▁▂▃▄▅▆▇█"
_BLANK: Final = 0x2800
# The dots of a braille cell, by column and by row from above.
_DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))

Values = Sequence[float | None]


def spark(values: Values, width: int, top: float | None = None) -> str:
    """The newest `width` values, newest on the right, as bars between 0 and `top` (else the highest shown)."""
    shown = list(values)[-width:] if width > 0 else []
    most = top if top is not None else max((v for v in shown if v is not None), default=0.0)
    bars = "".join(" " if v is None else _bar(v, most) for v in shown)
    return " " * (width - len(bars)) + bars


def _bar(value: float, most: float) -> str:
    if most <= 0:
        return _BARS[0]
    return _BARS[max(0, min(len(_BARS) - 1, round(value / most * (len(_BARS) - 1))))]


def chart(
    series: Sequence[tuple[Values, str]], width: int, height: int, write: Callable[[float | None], str]
) -> list[Line]:
    """`height` lines: an axis with its top and zero, then the newest values of every (values, style), newest on the
    right, two a cell. Where series meet, the later one's style is shown."""
    axis = 8
    columns = max(0, width - axis - 1)
    shown = [(list(values)[-2 * columns :] if columns else [], style) for values, style in series]
    most = max((v for values, _ in shown for v in values if v is not None), default=0.0)
    dots = [[0] * columns for _ in range(height)]
    styles = [[""] * columns for _ in range(height)]
    for values, style in shown:
        _draw(dots, styles, values, style, most)
    return [_row(_label(row, height, most, write, axis), dots[row], styles[row]) for row in range(height)]


def _label(row: int, height: int, most: float, write: Callable[[float | None], str], axis: int) -> str:
    if row == 0:
        return right(write(most) if most else "", axis)
    return right("0" if row == height - 1 else "", axis)


def _draw(dots: list[list[int]], styles: list[list[str]], values: list[float | None], style: str, most: float) -> None:
    """Each value as a dot, joined to the one before by the dots between them."""
    rows, columns = 4 * len(dots), len(dots[0]) if dots else 0
    start = 2 * columns - len(values)
    before: int | None = None
    for index, value in enumerate(values):
        if value is None:
            before = None
            continue
        level = rows - 1 - round(min(1.0, value / most if most > 0 else 0.0) * (rows - 1))
        x = start + index
        reached = level if before is None else before
        for y in range(min(level, reached), max(level, reached) + 1):
            dots[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
            styles[y // 4][x // 2] = style
        before = level


def _row(label: str, dots: list[int], styles: list[str]) -> Line:
    spans: list[Span] = [(pad(label, 8) + "┤", "rule")]
    for dot, style in zip(dots, styles, strict=True):
        char = chr(_BLANK + dot) if dot else " "
        if len(spans) > 1 and spans[-1][1] == style:
            spans[-1] = (spans[-1][0] + char, style)
        else:
            spans.append((char, style))
    return tuple(spans)
