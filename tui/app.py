"""The app: one feed, one view, and the screens that show it.

Owns the wiring: frames come in on the feed's thread, are folded on the app's, and the screen that is seen is redrawn.
It must not know what a screen shows: they are found in tui/screens. Enter at `Top`.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, SystemCommand
from textual.screen import Screen

from telemetry import plugins
from tui.dialogs import Text
from tui.feed import Feed
from tui.page import Desk, Page
from tui.palette import Palette
from tui.view import Frame, View

_HELP = """\
1-7        screens: overview, memory, kv, steps, requests, tuner, findings
tab        to the next screen; shift+tab back; or click on its name
↑ ↓ j k    move in a list; page up and down, home, end; or click
enter      open: a request's stages take the whole screen, and give it back; a finding's remedy, after a question
space      hold the display (a recording: pause); again to go on
← →        in a recording: ten seconds back or on; [ and ] a minute
S          save a screenshot as SVG in the current directory
ctrl+p     command palette
q          quit

requests   / filter by words of id, state, reason; escape clears; s next sort column; r reverse; a abort
steps      o only outliers (longer than three times the median)
tuner      f freeze, l release, p pin limits, s set a limit
findings   enter runs the remedy that is shown, after a question; n offers the next one

–          not reported: nobody knows; never the same as 0
memory     ■ in the bar is in use; the dark rest is reserve or room. 70 %: admission holds back; 85 %: planned most
times of day are UTC"""


def pages() -> list[type[Page]]:
    """The screens, in the order of their keys."""
    found: list[type[Page]] = [module.PAGE for module in plugins.load("tui.screens")]
    return sorted(found, key=lambda page: page.KEY)


class Top(App[None]):
    """`inferd top`. `runbook` gives a runbook's Markdown, `prefix` is how inferd is called for remedies, and `socket`
    the daemon that they are for; on a `remote` one they are not run."""

    CSS_PATH = "inferd.tcss"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar = [
        ("q", "quit", "Quit"),
        ("question_mark", "help", "Help"),
        ("space", "pause", "Hold or go on"),
        ("S", "picture", "Screenshot"),
        ("tab", "turn(1)", "Next screen"),
        ("shift+tab", "turn(-1)", "Screen before"),
        ("left", "seek(-10)", "Back"),
        ("right", "seek(10)", "On"),
        ("left_square_bracket", "seek(-60)", "A minute back"),
        ("right_square_bracket", "seek(60)", "A minute on"),
    ]

    def __init__(
        self,
        feed: Feed,
        runbook: Callable[[str], str | None] = lambda name: None,
        prefix: tuple[str, ...] = ("inferd",),
        socket: str = "",
        remote: bool = False,
        environ: Mapping[str, str] = os.environ,
        pictures: Path = Path(),
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__()
        self.title = "inferd top"
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-low"), (36, "-tall")]
        self.palette = Palette(colour=not environ.get("NO_COLOR"))
        self._pages = pages()
        self._pictures = pictures
        self._clock = now_ns
        tabs = tuple((page.KEY, page.NAME) for page in self._pages)
        self.desk = Desk(
            view=View(),
            feed=feed,
            palette=self.palette,
            runbook=runbook,
            tabs=tabs,
            prefix=prefix,
            socket=socket,
            remote=remote,
        )
        self._held: list[Frame] = []

    def on_mount(self) -> None:
        self.theme = "ansi-dark" if "ansi-dark" in self.available_themes else self.theme
        for page in self._pages:
            self.install_screen(page(self.desk), page.NAME.lower())
            self.bind(page.KEY, f"page('{page.NAME.lower()}')", description=page.NAME)
        self.push_screen(self._pages[0].NAME.lower())
        self.desk.feed.start(self._deliver)
        self.set_interval(1.0, self.redraw_age)

    def on_unmount(self) -> None:
        self.desk.feed.stop()

    def _deliver(self, frame: Frame) -> None:
        """On the feed's thread: posting a message is safe from any."""
        self.call_later(self.take, frame)

    def take(self, frame: Frame) -> None:
        """Fold a frame, or keep it while the display is held."""
        if self.desk.paused and not self.desk.feed.replayed:
            self._held = [*self._held[-600:], frame]
            return
        self.desk.view.take(frame)
        self._redraw()

    def redraw_age(self) -> None:
        """A source that is silent is told from one that is well: the age goes on."""
        if not self.desk.feed.replayed:
            self.desk.view.now_ns = self._clock()
            self._redraw(only="#header")

    def redraw_all(self) -> None:
        """Bring the screen up to date with the view."""
        self._redraw()

    def _redraw(self, only: str = "") -> None:
        for screen in self.screen_stack:
            if isinstance(screen, Page) and screen.is_mounted:
                screen.redraw(only)

    def page_shown(self) -> Page:
        """The screen that is shown, below any dialog."""
        return next(screen for screen in reversed(self.screen_stack) if isinstance(screen, Page))

    def action_page(self, name: str) -> None:
        self.desk.said = ""
        if isinstance(self.screen, Page) and self.screen.NAME.lower() != name:
            self.switch_screen(name)

    def action_turn(self, by: int) -> None:
        names = [page.NAME.lower() for page in self._pages]
        if isinstance(self.screen, Page):
            self.action_page(names[(names.index(self.screen.NAME.lower()) + by) % len(names)])

    def action_pause(self) -> None:
        self.desk.paused = not self.desk.paused
        self.desk.feed.pause(self.desk.paused)
        if not self.desk.paused:
            for frame in self._held:
                self.desk.view.take(frame)
            self._held = []
        self._redraw()

    def action_seek(self, seconds: int) -> None:
        self.desk.feed.seek(float(seconds))

    def action_help(self) -> None:
        self.push_screen(Text("inferd top: keys and signs", _HELP.splitlines()))

    def action_picture(self) -> None:
        """As SVG, for the ticket."""
        path = Path(self.save_screenshot(path=str(self._pictures)))
        if isinstance(self.screen, Page):
            self.screen.say(f"saved {path}")

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette: every screen, and what a screen can do."""
        for page in self._pages:
            name = page.NAME.lower()
            yield SystemCommand(page.NAME, f"Show {name} ({page.KEY})", lambda name=name: self.action_page(name))
        yield SystemCommand("Screenshot", "Save this screen as SVG (S)", self.action_picture)
        yield SystemCommand("Hold", "Hold the display, or go on (space)", self.action_pause)
        yield SystemCommand("Help", "Keys and signs (?)", self.action_help)
        yield SystemCommand("Quit", "Leave (q)", self.exit)
