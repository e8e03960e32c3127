"""Findings: what the checks found and what went wrong, with the runbook beside; a remedy runs after a confirmation."""

from typing import ClassVar

from rich.markdown import Markdown
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Static

from telemetry.events import SEVERITIES, EngineEnded, Finding, Incident
from tui.dialogs import Confirm, Text
from tui.page import Page, rows_of
from tui.panels import note_line
from tui.remedies import commands, run
from tui.text import Line, line, percent, rule, wrapped
from tui.view import Note, View
from tui.widgets.lines import Board, Rows


def listed(view: View) -> list[Note]:
    """Findings that hold, worst first, then incidents and engines' ends, newest first."""
    held = sorted(
        (view.snapshot.findings or []) if view.snapshot else [],
        key=lambda f: (-SEVERITIES.index(f.severity) if f.severity in SEVERITIES else 0, -f.at_ns),
    )
    past = [
        note
        for note in reversed(view.notes)
        if isinstance(note, Incident) or (isinstance(note, EngineEnded) and note.cause != "drained")
    ]
    return [*held, *past]


def detail(note: Note | None, remedies: list[str], width: int) -> list[Line]:
    """Evidence and next step of a finding; what an incident holds."""
    if note is None:
        return [rule("Evidence", width), line((" nothing is wrong that a check knows", "dim"))]
    if isinstance(note, Finding):
        lines = [rule(note.runbook, width, f"{note.severity}, confidence {percent(note.confidence)}")]
        lines += wrapped([line((word, "strong")) for word in note.summary.split()], width, " ")
        lines += [line((f" {name} ", "label"), value) for name, value in note.evidence.items()]
        lines += wrapped([line((word, "key")) for word in ("→", *note.next_step.split())], width, " ")
        offered = [line((" enter runs: ", "label"), (remedies[0], "key"))] if remedies else []
        return [*lines, *offered]
    if isinstance(note, Incident):
        facts = (("cause", note.cause), ("requests", ", ".join(note.request_ids)), ("bundle", note.bundle))
        said = wrapped([line((word, "strong")) for word in note.summary.split()], width, " ")
        return [
            rule(note.incident_id, width, note.kind),
            *said,
            *(line((f" {name} ", "label"), value or "none") for name, value in facts),
        ]
    if isinstance(note, EngineEnded):
        return [rule("Engine ended", width, note.cause), line(f" {note.detail}")]
    return []


class Findings(Page):
    """A list and its evidence on one side, the runbook on the other (below, where it is narrow)."""

    NAME: ClassVar[str] = "Findings"
    KEY: ClassVar[str] = "7"
    KEYS: ClassVar[tuple[tuple[str, str], ...]] = (("enter", "run the remedy"), ("n", "next remedy"))
    BINDINGS: ClassVar = [("n", "next_remedy", "Offer the next remedy")]
    AUTO_FOCUS = "#list"

    def body(self) -> ComposeResult:
        self._notes: list[Note] = []
        self._remedies: list[str] = []
        self._shown = ""  # whose runbook is rendered
        with Horizontal(id="halves"):
            with Vertical(id="left"):
                yield Rows(
                    lambda at, width: note_line(self.view, self._notes[at], width), id="list", empty="no finding"
                )
                yield Board(lambda width, height: detail(self._current(), self._remedies, width), id="detail")
            with VerticalScroll(id="right"):
                yield Static(id="runbook")  # one widget: one a paragraph takes a third of a second to lay out

    def _current(self) -> Note | None:
        cursor = rows_of(self, "list").cursor
        return self._notes[cursor] if 0 <= cursor < len(self._notes) else None

    def update_rows(self) -> None:
        self._notes = listed(self.view)
        rows_of(self, "list").show(len(self._notes))
        self._select()

    @on(Rows.Moved, "#list")
    def _moved(self) -> None:
        self._select()
        self.query_one("#detail", Board).redraw()

    def _select(self) -> None:
        """Render the runbook of the finding under the cursor, once."""
        note = self._current()
        name = note.runbook if isinstance(note, Finding) else type(note).__name__
        if name == self._shown:
            return
        self._shown = name
        text = self.desk.runbook(note.runbook) if isinstance(note, Finding) else None
        self._remedies = commands(note, text) if isinstance(note, Finding) else []
        missing = f"No runbook called `{name}` is at hand." if isinstance(note, Finding) else ""
        self.query_one("#runbook", Static).update(Markdown(text or missing, code_theme="ansi_dark"))

    def action_next_remedy(self) -> None:
        self._remedies = [*self._remedies[1:], *self._remedies[:1]]
        self.redraw()

    @on(Rows.Opened, "#list")
    def _opened(self) -> None:
        if self.desk.feed.replayed:
            self.say("this is a recording: there is nothing to remedy", "warning")
            return
        if self.desk.remote:
            self.say("the daemon is on another machine: run it there", "warning")
            return
        if not self._remedies:
            self.say("no command is offered here; read the runbook", "warning")
            return
        command = self._remedies[0]

        def decided(yes: bool | None) -> None:
            if yes:
                self.say(f"running: {command}", "info")
                self.run_worker(lambda: self._run(command), thread=True)

        self.app.push_screen(Confirm("Run this remedy?", command), decided)

    def _run(self, command: str) -> None:
        status, output = run(command, self.desk.prefix, self.desk.socket)
        done = f"{command}: {'done' if status == 0 else f'exit {status}'}"
        self.app.call_from_thread(self.say, done, "good" if status == 0 else "critical")
        self.app.call_from_thread(self.app.push_screen, Text(done, output.splitlines() or ["(no output)"]))


PAGE = Findings
