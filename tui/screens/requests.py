"""Requests: running, waiting and ended choices; sorted, filtered, opened as a Gantt chart, aborted."""

from typing import Any, ClassVar
from urllib.parse import quote

from textual import events, on
from textual.app import ComposeResult
from textual.widgets import Input

from telemetry.client import ClientError
from tui.dialogs import Confirm
from tui.page import Page, rows_of
from tui.rowtable import TABLE, Listed, Row, requests
from tui.text import UNKNOWN, Line, count, line, nanoseconds, rule
from tui.view import View
from tui.widgets.gantt import gantt, ticks
from tui.widgets.lines import Board, Rows


def detail(view: View, row: Row | None, width: int) -> list[Line]:
    """One request, opened: its facts, its stages, its steps."""
    if row is None:
        return [rule("Request", width), line((" none is selected", "dim"))]
    facts = (
        f"prompt {count(row.prompt)} ({count(row.cached)} cached)  output {count(row.output)} of {count(row.most)}  "
        f"blocks {count(row.blocks)}  preempted {count(row.preemptions)}×"
    )
    lines = [rule(row.request_id, width, f"{row.state} {row.why}".strip()), line(f" {facts}")]
    pieces = view.timelines.of(row.request_id)
    record = row.record
    if record is None:
        received_ns = row.live.received_ns if row.live else None
        if received_ns is None or view.snapshot is None or not pieces:
            return [*lines, line((" its stages are known when it has ended; no step of it was seen yet", "dim"))]
        return [*lines, *ticks(received_ns, view.snapshot.at_ns, pieces, max(10, width - 32))]
    waste = f"{record.kv_tail_slots} slots of tail waste" if record.kv_tail_slots else "no tail waste"
    ttft = record.first_token_ns - record.arrival_ns if record.first_token_ns else None
    lines.append(
        line(
            f" {record.operation}{' stream' if record.stream else ''}  status {record.status}  "
            f"TTFT {nanoseconds(ttft)}  {record.prefill_chunks} chunks  {record.preempted_tokens} tokens lost  {waste}"
        )
    )
    lines += gantt(record, pieces, width)
    over = "  ".join(f"{name} {nanoseconds(spent)}" for name, spent in record.overlaps.items())
    steps = "" if pieces else "; its steps were not seen"
    return [*lines, line((f" inside these: {over or UNKNOWN}{steps}", "dim"))]


class Requests(Page):
    """A table, and beneath it the request under the cursor."""

    NAME: ClassVar[str] = "Requests"
    KEY: ClassVar[str] = "5"
    WANTS: ClassVar[frozenset[str]] = frozenset({"requests"})
    KEYS: ClassVar[tuple[tuple[str, str], ...]] = (("enter", "open"), ("/", "filter"), ("s", "sort"), ("a", "abort"))
    BINDINGS: ClassVar = [
        ("slash", "filter", "Filter by words of id, state, reason"),
        ("s", "sort", "Sort by the next column"),
        ("r", "reverse", "Reverse the order"),
        ("a", "abort", "Abort the request under the cursor"),
    ]
    AUTO_FOCUS = "#list"

    sorted_by = ""
    descending = True
    wanted = ""

    def body(self) -> ComposeResult:
        self._rows = Listed([], 0)
        self._open = ""  # the id that the cursor stays on while rows move
        yield Board(lambda width, height: [self._summary(width)], classes="edge")
        yield Input(placeholder="words of id, state or reason; enter", id="filter")
        yield Board(
            lambda width, height: [TABLE.head(width, self.sorted_by, self.descending)], id="head", classes="edge"
        )
        yield Rows(lambda at, width: TABLE.line(self._rows[at], width), id="list", empty="no request")
        yield Board(lambda width, height: detail(self.view, self._current(), width), id="detail")

    def _summary(self, width: int) -> Line:
        live = self.view.live()
        said = "no answer of the engine: what runs is not reported" if live is None else ""
        order = f"by {self.sorted_by}" if self.sorted_by else "by state"
        only = f"  only '{self.wanted}'" if self.wanted else ""
        return line((f" {count(len(self._rows))} requests {order}{only}  ", "label"), (said, "warning"))

    def _current(self) -> Row | None:
        cursor = rows_of(self, "list").cursor
        return self._rows[cursor] if 0 <= cursor < len(self._rows) else None

    def update_rows(self) -> None:
        """The cursor stays on its request when rows come and go above it."""
        rows = requests(self.view)
        if self.wanted:
            rows = rows.matching(self.wanted)
        self._rows = rows.ordered(self.sorted_by, self.descending)
        listed = rows_of(self, "list")
        if self._open:
            at = self._rows.place(self._open)
            if at is not None:
                listed.cursor = at
        listed.show(len(self._rows))

    @on(Rows.Moved, "#list")
    def _moved(self) -> None:
        row = self._current()
        self._open = row.request_id if row else ""
        self.query_one("#detail", Board).redraw()

    @on(Rows.Opened, "#list")
    def _opened(self) -> None:
        """The stages get the whole screen; again, and the list is back."""
        self.toggle_class("opened")
        self.call_after_refresh(self.redraw)

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.add_class("open")
        box.focus()

    @on(Input.Submitted, "#filter")
    def _filtered(self, event: Input.Submitted) -> None:
        self.wanted = event.value.strip()
        event.input.remove_class("open")
        rows_of(self, "list").focus()
        self.redraw()

    def on_key(self, event: events.Key) -> None:
        if event.key == "escape":
            box = self.query_one("#filter", Input)
            box.value, self.wanted = "", ""
            box.remove_class("open")
            self.remove_class("opened")
            rows_of(self, "list").focus()
            self.redraw()

    def on_click(self, event: events.Click) -> None:
        super().on_click(event)
        if event.widget is not None and event.widget.id == "head":
            title = TABLE.column_at(event.x, self.size.width)
            if title:
                self.descending = not self.descending if title == self.sorted_by else True
                self.sorted_by = title
                self.redraw()

    def action_sort(self) -> None:
        titles = ["", *(column.title for column, _ in TABLE.shown(self.size.width))]
        self.sorted_by = titles[(titles.index(self.sorted_by) + 1) % len(titles)] if self.sorted_by in titles else ""
        self.redraw()

    def action_reverse(self) -> None:
        self.descending = not self.descending
        self.redraw()

    def action_abort(self) -> None:
        row = self._current()
        if row is None or row.state == "finished":
            self.say("only a running or waiting request can be aborted", "warning")
            return
        path = f"/inferd/v1/abort/{quote(row.request_id, safe='')}"

        def decided(yes: bool | None) -> None:
            if yes:
                self.run_worker(lambda: self._abort(path), thread=True)

        self.app.push_screen(
            Confirm("Abort this request?", f"POST {path}", "its client gets what it has so far"), decided
        )

    def _abort(self, path: str) -> None:
        try:
            answer: Any = self.desk.feed.post(path)
        except ClientError as error:
            self.app.call_from_thread(self.say, str(error), "critical")
        else:
            self.app.call_from_thread(self.say, f"aborted: {answer['aborted_choices']} choices")


PAGE = Requests
