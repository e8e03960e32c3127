"""Overview: state, limits, live lines, where time and memory go, findings and decisions. What is looked at first."""

from typing import ClassVar

from textual.app import ComposeResult

from tui.page import Page
from tui.panels import overview
from tui.widgets.lines import Board


class Overview(Page):
    """One board over the whole screen."""

    NAME: ClassVar[str] = "Overview"
    KEY: ClassVar[str] = "1"

    def body(self) -> ComposeResult:
        yield Board(lambda width, height: overview(self.view, width, height), id="overview")


PAGE = Overview
