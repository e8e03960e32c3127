"""The two widgets that everything is painted with, on Textual's line API.

`Board` shows lines that are drawn anew from the view; `Rows` is a list with a cursor that may have thousands of rows,
of which only the visible ones are made. Both compare what they would paint with what is on the screen, and refresh the
rows that differ. They must not know what the lines say. Enter at either.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

from rich.segment import Segment
from textual import events
from textual.app import App
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from tui.palette import Palette
from tui.text import Line, fit

_JOINED = 4  # lines
Draw = Callable[[int, int], Sequence[Line]]  # (width, height) → lines


def palette_of(app: App[Any]) -> Palette:
    """The app's; widgets cannot know its class, which is above them."""
    return cast(Palette, app.palette)  # type: ignore[attr-defined]


def _strip(spans: Line, width: int, palette: Palette) -> Strip:
    return Strip([Segment(text, palette[style]) for text, style in fit(spans, width)], width)


class Board(Widget):
    """Lines drawn by `draw` for the size there is; `redraw` when what they show has changed."""

    def __init__(self, draw: Draw, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._draw = draw
        self._lines: list[Line] = []
        self.painted = 0  # lines refreshed so far: what a test counts

    def redraw(self) -> None:
        """Draw anew; refresh the lines that differ."""
        width, height = self.size
        if not width or not height:
            return
        lines = list(self._draw(width, height))[:height]
        before, self._lines = self._lines, lines
        changed = [y for y in range(height) if _at(lines, y) != _at(before, y)]
        self.painted += len(changed)
        if changed:
            self.refresh(*_regions(changed, width))

    def on_resize(self, event: events.Resize) -> None:
        self._lines = []
        self.redraw()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        return _strip(_at(self._lines, y), self.size.width, palette_of(self.app))


def _regions(changed: Sequence[int], width: int) -> list[Region]:
    """The lines as few regions: each costs the compositor a pass, so that a line or two between are painted along."""
    runs: list[tuple[int, int]] = []
    for y in changed:
        if runs and y - runs[-1][1] <= _JOINED:
            runs[-1] = (runs[-1][0], y)
        else:
            runs.append((y, y))
    return [Region(0, first, width, last - first + 1) for first, last in runs]


def _at(lines: Sequence[Line], y: int) -> Line:
    return lines[y] if y < len(lines) else ()


class Rows(ScrollView, can_focus=True):
    """`count` rows, each made by `row(index, width)` when it can be seen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home,g", "edge(-1)", "first", show=False),
        Binding("end,G", "edge(1)", "last", show=False),
        Binding("enter", "open", "open", show=False),
    ]

    class Moved(Message):
        """The cursor is on another row."""

        def __init__(self, rows: "Rows") -> None:
            super().__init__()
            self.rows = rows

        @property
        def control(self) -> "Rows":
            return self.rows

    class Opened(Moved):
        """Enter, or a click on the row under the cursor."""

    def __init__(self, row: Callable[[int, int], Line], *, id: str | None = None, empty: str = "") -> None:
        super().__init__(id=id)
        self._row = row
        self._empty = empty
        self._shown: dict[int, Line] = {}
        self.count = 0
        self.cursor = 0
        self.made = 0  # rows built so far: what a test counts

    def show(self, count: int) -> None:
        """There are `count` rows now, and any of them may differ."""
        self.cursor = max(0, min(self.cursor, count - 1))
        if count != self.count:
            self.count = count
            self.virtual_size = Size(self.size.width, count)
        top, height = self.scroll_offset.y, self.size.height
        made = {y: self._made(y) for y in range(top, top + height)}
        changed = [y for y, spans in made.items() if spans != self._shown.get(y)]
        self._shown = made
        if changed:
            self.refresh(*_regions([y - top for y in changed], self.size.width))

    def on_resize(self, event: events.Resize) -> None:
        self.virtual_size = Size(self.size.width, self.count)
        self._repaint()

    def _repaint(self) -> None:
        """Every row that is seen: the cursor or the width is another."""
        self._shown = {}
        self.refresh()

    def render_line(self, y: int) -> Strip:
        row = self.scroll_offset.y + y
        made = self._shown.get(row)
        if made is None:
            made = self._shown[row] = self._made(row)
        return _strip(made, self.scrollable_content_region.width or self.size.width, palette_of(self.app))

    def _made(self, row: int) -> Line:
        width = self.scrollable_content_region.width or self.size.width
        if row >= self.count:
            return ((f" {self._empty}", "dim"),) if row == 0 else ()
        self.made += 1
        spans = fit(self._row(row, width), width)
        if row == self.cursor and self.has_focus:
            return tuple((text, "cursor") for text, _ in spans)
        return spans

    def move_to(self, row: int) -> None:
        """Put the cursor on `row`, and scroll so that it is seen."""
        before, self.cursor = self.cursor, max(0, min(row, self.count - 1))
        if before == self.cursor:
            return
        top, height = self.scroll_offset.y, self.size.height
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False)
        self._repaint()
        self.post_message(self.Moved(self))

    def on_focus(self) -> None:
        self._repaint()

    def on_blur(self) -> None:
        self._repaint()

    def on_click(self, event: events.Click) -> None:
        row = self.scroll_offset.y + event.y
        if row < self.count:
            again = row == self.cursor and event.chain >= 2
            self.move_to(row)
            if again:
                self.action_open()

    def action_move(self, by: int) -> None:
        self.move_to(self.cursor + by)

    def action_page(self, by: int) -> None:
        self.move_to(self.cursor + by * max(1, self.size.height - 1))

    def action_edge(self, which: int) -> None:
        self.move_to(0 if which < 0 else self.count - 1)

    def action_open(self) -> None:
        if self.count:
            self.post_message(self.Opened(self))
