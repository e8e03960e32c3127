"""Memory: the ladder now and over time, and what each process's ledger and probe say."""

from typing import ClassVar

from textual.app import ComposeResult

from tui.page import Page
from tui.panels import memory
from tui.text import NOT_REPORTED, Line, beside, line, pad, percent, right, rule, size
from tui.view import View
from tui.widgets.ladder import HARD_LINE, WATERMARK
from tui.widgets.lines import Board
from tui.widgets.spark import chart


def draw(view: View, width: int, height: int) -> list[Line]:
    """The ladder; then its history; then the tables, side by side where there is room."""
    lines = [*memory(view, width), *over_time(view, width, 5 if height < 30 else 10)]
    blocks = tables(view, min(width, 78))
    if width >= 150:
        half = (width - 2) // 2
        both = tables(view, half)
        return [*lines, *beside(both[0], both[1], half)] if len(both) == 2 else [*lines, *both[0]]
    return [*lines, *(row for block in blocks for row in block)]


def over_time(view: View, width: int, height: int) -> list[Line]:
    """Bytes in use over what was seen, with the lines it must stay under."""
    rungs = list(view.rungs)
    if not rungs:
        return [rule("In use over time", width, NOT_REPORTED)]
    span_s = (rungs[-1].at_ns - rungs[0].at_ns) / 1e9
    limit = rungs[-1].limit_bytes
    used = [rung.used_bytes for rung in rungs]
    known = [value for value in used if value is not None]
    note = f"{span_s / 60:.0f} min, most {size(max(known, default=None))}" if span_s >= 60 else f"{span_s:.0f} s"
    series: list[tuple[list[float | None], str]] = []
    if limit:
        series += [([share * limit] * 4096, "rule") for share in (WATERMARK, HARD_LINE)]
        note += f"; lines at 70 and 85 % of {size(limit)}"
    values: list[float | None] = [None if value is None else float(value) for value in used]
    drawn = chart([*series, (values, "p95")], width - 1, height, lambda value: size(int(value or 0)))
    return [rule("In use over time", width, note), *drawn]


def tables(view: View, width: int) -> list[list[Line]]:
    """Booked by owner, and measured by kind, for each process that reports."""
    found = view.snapshot.memory if view.snapshot else None
    if found is None:
        return [[rule("Ledger and probe", width, NOT_REPORTED)]]
    booked, measured = found.booked or {}, found.measured or {}
    ledger = _table("Booked, by the ledger", booked, width, found.limit_bytes)
    probe = _table("Measured, by the probe", measured, width, None)
    resident = {"engine": found.engine_resident_bytes, "daemon": found.daemon_resident_bytes}
    probe += [line((pad(f" {name} resident", 34), "label"), right(size(n), 12)) for name, n in resident.items()]
    return [ledger, probe]


def _table(title: str, by_process: dict[str, dict[str, int]], width: int, limit: int | None) -> list[Line]:
    if not by_process:
        return [rule(title, width, NOT_REPORTED)]
    lines = [rule(title, width)]
    for process, amounts in by_process.items():
        for name, amount in sorted(amounts.items(), key=lambda pair: -pair[1]):
            share = f"{percent(amount / limit):>7}" if limit else ""
            lines.append(line((pad(f" {process} {name}", 34), "label"), right(size(amount), 12), share))
    return lines


class Memory(Page):
    """One board over the whole screen."""

    NAME: ClassVar[str] = "Memory"
    KEY: ClassVar[str] = "2"

    def body(self) -> ComposeResult:
        yield Board(lambda width, height: draw(self.view, width, height), id="memory")


PAGE = Memory
