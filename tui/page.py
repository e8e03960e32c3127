"""The frame of every screen: header, tabs, the screen's own body, keys.

Owns what a screen is given (`Desk`) and how it is brought up to date. It must not know which screens there are: they
are the modules of tui/screens, each with a `PAGE`. Enter at `Page`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.screen import Screen

from tui.feed import Feed
from tui.palette import Palette
from tui.panels import header
from tui.text import Line, Span, cells, line
from tui.view import View
from tui.widgets.lines import Board, Rows


@dataclass(slots=True, kw_only=True)
class Desk:
    """What screens work with. `runbook` gives a runbook's Markdown by its name, or None."""

    view: View
    feed: Feed
    palette: Palette
    runbook: Callable[[str], str | None]
    tabs: tuple[tuple[str, str], ...] = ()  # (key, title)
    paused: bool = False
    said: str = ""  # the last action's outcome, in the footer
    said_style: str = ""
    socket: str = ""  # of the daemon that is watched, if it is on this machine
    remote: bool = False  # it is on another one: remedies would act on this one
    prefix: tuple[str, ...] = field(default_factory=lambda: ("inferd",))  # how `inferd` is called, for remedies


_EDGES = 3  # header, tabs, footer


class Page(Screen[None]):
    """One screen. Sub-classes give NAME, KEY, and `body`; `WANTS` is what their frames need of the engine."""

    NAME: ClassVar[str]
    KEY: ClassVar[str]
    WANTS: ClassVar[frozenset[str]] = frozenset()
    KEYS: ClassVar[tuple[tuple[str, str], ...]] = ()  # (key, what it does) for the footer

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self.desk = desk

    @property
    def view(self) -> View:
        return self.desk.view

    def compose(self) -> ComposeResult:
        yield Board(lambda width, height: [header(self.view, width)], id="header", classes="edge")
        yield Board(lambda width, height: [self._tabs(width)], id="tabs", classes="edge")
        yield from self.body()
        yield Board(lambda width, height: [self._footer(width)], id="footer", classes="edge")

    def body(self) -> ComposeResult:
        raise NotImplementedError

    def redraw(self, only: str = "") -> None:
        """Bring what is shown, or only the board called so, up to date with the view."""
        if len(self.query(".edge")) < _EDGES or not self.is_running:
            return  # not composed yet, or being taken down
        if not only:
            self.update_rows()
        for board in self.query(only or "Board").results(Board):
            board.redraw()

    def update_rows(self) -> None:
        """Sub-classes with lists hand them their rows here."""

    def on_screen_resume(self, event: events.ScreenResume) -> None:
        self.desk.feed.want(self.WANTS)
        self.call_after_refresh(self.redraw)

    def on_click(self, event: events.Click) -> None:
        """A tab was clicked."""
        if event.widget is not None and event.widget.id == "tabs":
            x = 1
            for key, title in self.desk.tabs:
                end = x + cells(f" {key} {title} ")
                if x <= event.x < end:
                    self.app.call_later(self.app.run_action, f"page('{title.lower()}')")
                x = end

    def say(self, text: str, style: str = "good") -> None:
        """An action's outcome, shown in the footer until the next one."""
        self.desk.said, self.desk.said_style = text, style
        for board in self.query("#footer").results(Board):
            board.redraw()

    def _tabs(self, width: int) -> Line:
        spans: list[Span] = [(" ", "")]
        for key, title in self.desk.tabs:
            spans.append((f" {key} {title} ", "tab" if title == self.NAME else "label"))
        return tuple(spans)

    def _footer(self, width: int) -> Line:
        if self.desk.said:
            return line((f" {self.desk.said}", self.desk.said_style))
        common: Sequence[tuple[str, str]] = (("?", "help"), ("^p", "palette"), ("space", "pause"), ("q", "quit"))
        if self.desk.feed.replayed:
            common = (("←→", "seek"), *common)
        spans: list[Any] = []
        for key, what in (*self.KEYS, *common):
            spans += [(f" {key}", "key"), f" {what} "]
        paused = [("  PAUSED ", "warning")] if self.desk.paused else []
        return line(*spans, *paused)


def rows_of(page: Page, id: str) -> Rows:
    """The page's list called `id`."""
    return page.query_one(f"#{id}", Rows)
