"""Tables: columns of fixed width with a title each; one of them takes what is left.

Pure: a row in, a line out; rows are made only when they can be seen. Enter at `Column` and `Table`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tui.text import Line, Span, pad, right

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[Row]):
    """`text` is what is shown, `key` what is sorted by (None sorts last); figures stand right. `least` is the terminal
    width from which on the column is shown; `width` 0 takes what is left."""

    title: str
    width: int
    text: Callable[[Row], str | Span]
    key: Callable[[Row], Any] | None = None
    figures: bool = True
    least: int = 0


class Table(Generic[Row]):
    """Columns, laid out for a width."""

    def __init__(self, columns: Sequence[Column[Row]]) -> None:
        self.columns = tuple(columns)
        self._shown: tuple[int, list[tuple[Column[Row], int]]] = (-1, [])

    def shown(self, width: int) -> list[tuple[Column[Row], int]]:
        """The columns that fit, with their widths."""
        if self._shown[0] == width:
            return self._shown[1]
        columns = [column for column in self.columns if column.least <= width]
        fixed = sum(column.width for column in columns) + len(columns) + 1
        self._shown = (width, [(column, column.width or max(8, width - fixed)) for column in columns])
        return self._shown[1]

    def head(self, width: int, sorted_by: str = "", descending: bool = True) -> Line:
        spans: list[Span] = [(" ", "")]
        for column, cells in self.shown(width):
            marked = column.title == sorted_by
            title = f"{column.title}{'▼' if descending else '▲'}" if marked else column.title
            text = right(title, cells) if column.figures else pad(title, cells)
            spans += [(text, "title" if marked else "label"), (" ", "")]
        return tuple(spans)

    def line(self, row: Row, width: int) -> Line:
        spans: list[Span] = [(" ", "")]
        for column, cells in self.shown(width):
            value = column.text(row)
            text, style = (value, "") if isinstance(value, str) else value
            spans += [(right(text, cells) if column.figures else pad(text, cells), style), (" ", "")]
        return tuple(spans)

    def column_at(self, x: int, width: int) -> str:
        """The title over the cell `x`, or nothing."""
        start = 1
        for column, cells in self.shown(width):
            if start <= x < start + cells + 1:
                return column.title
            start += cells + 1
        return ""

    def order(self, rows: Sequence[Row], by: str, descending: bool) -> list[int]:
        """Places in `rows`, sorted by the column called `by`; what is not reported comes last either way."""
        column = next((c for c in self.columns if c.title == by and c.key is not None), None)
        if column is None or column.key is None:
            return list(range(len(rows)))
        keys = [column.key(row) for row in rows]
        known = [at for at, key in enumerate(keys) if key is not None]
        known.sort(key=lambda at: keys[at], reverse=descending)
        return known + [at for at, key in enumerate(keys) if key is None]

    def ordered(self, rows: Sequence[Row], by: str, descending: bool) -> list[Row]:
        """The rows in that order."""
        return [rows[at] for at in self.order(rows, by, descending)]
