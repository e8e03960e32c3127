"""Steps: the last ones as lanes by phase beside what the cost model expects, and as a list with what each did, what
bound it, and which were outliers."""

from collections.abc import Sequence
from statistics import median
from typing import ClassVar, Final

from textual.app import ComposeResult

from telemetry.events import STEP_PHASES, StepReport
from tui.costmodel import Model, taken_ns
from tui.page import Page, rows_of
from tui.text import NOT_REPORTED, UNKNOWN, Line, Span, clock, count, line, nanoseconds, pad, percent, right, rule
from tui.view import View
from tui.widgets.lines import Board, Rows
from tui.widgets.spark import spark
from tui.widgets.table import Column, Table

OUTLIER: Final = 3.0  # times what the cost model expects; without a good one, the median of the steps that are kept


def step_ns(report: StepReport) -> float:
    """Host time of one step; of a merged report, the mean."""
    return sum(phase_ns(report, phase) for phase in STEP_PHASES)


def phase_ns(report: StepReport, phase: str) -> float:
    """One phase of it, alike."""
    spent_ns: int = getattr(report, f"{phase}_ns")
    return spent_ns / max(1, report.merged)


def model_of(view: View) -> Model | None:
    """The daemon's fit of step cost, if it told one."""
    shares = view.snapshot.time_breakdown if view.snapshot else None
    return Model.of(shares.step_cost if shares else None)


def outliers(steps: list[StepReport], model: Model | None = None) -> set[int]:
    """Numbers of the steps that took far longer than the cost model expects of their kind; than the median one, as
    long as there is no model to be trusted."""
    if model is not None and model.trusted:
        return {report.step for report in steps if (model.times(report) or 0.0) > OUTLIER}
    if len(steps) < 8:
        return set()
    usual = median(step_ns(report) for report in steps)
    return {report.step for report in steps if step_ns(report) > OUTLIER * usual}


def lanes(view: View, width: int) -> list[Line]:
    """A lane a phase, newest step on the right; every lane has its own scale, whose top stands at its left. What was
    expected is drawn on the scale of what was taken."""
    steps = list(view.steps)
    if not steps:
        return [rule("Lanes", width, NOT_REPORTED), line((" no step was seen yet", "dim"))]
    room = max(0, width - 34)
    shown = steps[-room:] if room else []
    model = model_of(view)
    lines = [rule("Lanes by phase", width, f"last {len(shown)} reports; each lane has its own scale")]
    lines.append(line((pad(" ", 11) + right("median", 10) + right("most", 10), "label")))
    total = [step_ns(report) for report in shown]
    lines.append(_lane("step", total, room, "p99"))
    expected = [model.expected_ns(report) if model else None for report in shown]
    lines.append(_lane("expected", expected, room, "p50", max(total, default=0.0)))
    lines += [_lane(name, [phase_ns(report, name) for report in shown], room, "p95") for name in STEP_PHASES]
    forward = [r.forward_ns / max(1, r.merged) if r.forward_ns else None for r in shown]
    lines.append(_lane("forward", forward, room, "p50"))
    return [*lines, _bounds(shown), _fit(model, shown)]


def _lane(name: str, values: Sequence[float | None], room: int, style: str, top: float | None = None) -> Line:
    known = [value for value in values if value is not None]
    usual = nanoseconds(int(median(known))) if known else UNKNOWN
    most = nanoseconds(int(max(known))) if known else UNKNOWN
    return line(
        (pad(f" {name}", 11), "label"), right(usual, 10), right(most, 10), "  ", (spark(values, room, top), style)
    )


def _bounds(steps: list[StepReport]) -> Line:
    """What bound them."""
    tally: dict[str, int] = {}
    for report in steps:
        name = report.bound or NOT_REPORTED
        tally[name] = tally.get(name, 0) + report.merged
    said = "   ".join(f"{name} {count(number)}" for name, number in sorted(tally.items(), key=lambda pair: -pair[1]))
    return line((" bound by   ", "label"), said)


def _fit(model: Model | None, steps: list[StepReport]) -> Line:
    """The cost model in a line: how these steps compare with it, how far off it is on average, and what a prompt token
    costs. The other costs are no figures for people: with a batch that never changes, a fit cannot tell them apart."""
    if model is None:
        return line((" cost model ", "label"), (NOT_REPORTED, "dim"))
    taken = sum(taken_ns(report) * report.merged for report in steps)
    expected = sum(model.expected_ns(report) * report.merged for report in steps)
    compared = f"these steps took {taken / expected:.2f}× what it expects" if expected > 0 else "it expects nothing"
    off = (f"; off by {percent(model.error_ratio)}", "" if model.trusted else "warning")
    token = f"; {nanoseconds(int(model.prompt_token_ns))} a prompt token" if model.prompt_token_ns > 0 else ""
    return line((" cost model ", "label"), compared, off, token)


def table(view: View, flagged: set[int]) -> Table[StepReport]:
    """The list's columns; `flagged` are outliers."""
    model = model_of(view)

    def took(report: StepReport) -> Span:
        return nanoseconds(int(step_ns(report))), "critical" if report.step in flagged else ""

    def against(report: StepReport) -> str:
        times = model.times(report) if model else None
        return UNKNOWN if times is None else f"{times:.1f}×" if times < 99.95 else f"{times:,.0f}×"

    def phase(name: str) -> Column[StepReport]:
        return Column(title=name, width=8, text=lambda r: nanoseconds(int(phase_ns(r, name))), least=110)

    return Table(
        [
            Column(title="step", width=8, text=lambda r: count(r.step)),
            Column(title="at", width=8, text=lambda r: clock(view.unix(r.at_ns))),
            Column(title="n", width=3, text=lambda r: str(r.merged)),
            Column(title="took", width=8, text=took),
            Column(title="model", width=6, text=against),
            *(phase(name) for name in STEP_PHASES[:4]),
            Column(title="prompt", width=6, text=lambda r: count(r.prefill_tokens)),
            Column(title="decode", width=6, text=lambda r: count(r.decode_tokens)),
            Column(title="again", width=6, text=lambda r: count(r.recompute_tokens), least=100),
            Column(title="run", width=3, text=lambda r: count(r.running)),
            Column(title="wait", width=4, text=lambda r: count(r.waiting)),
            Column(title="blocks", width=6, text=lambda r: count(r.kv_active), least=90),
            Column(title="bound by", width=0, text=lambda r: _why(r, flagged), figures=False),
        ]
    )


def _why(report: StepReport, flagged: set[int]) -> Span:
    """What bound a step; of an outlier also what was unusual about it."""
    said = report.bound or UNKNOWN
    if report.step not in flagged:
        return said, "dim"
    parts = {name: getattr(report, f"{name}_ns") for name in STEP_PHASES}
    slowest = max(parts, key=lambda name: parts[name])
    why = [f"{slowest} took it"]
    if report.prefill_tokens:
        why.append("with a prompt")
    if report.preemptions:
        why.append(f"{len(report.preemptions)} preempted")
    return f"{said}: {', '.join(why)}", "warning"


class Steps(Page):
    """Lanes above, the list below: newest first, outliers alone with `o`."""

    NAME: ClassVar[str] = "Steps"
    KEY: ClassVar[str] = "4"
    KEYS: ClassVar[tuple[tuple[str, str], ...]] = (("o", "outliers"),)
    BINDINGS: ClassVar = [("o", "outliers", "Only outliers, or all")]
    AUTO_FOCUS = "#list"

    only_outliers = False

    def body(self) -> ComposeResult:
        self._rows: list[StepReport] = []
        self._table = table(self.view, set())
        yield Board(lambda width, height: lanes(self.view, width), id="lanes")
        yield Board(lambda width, height: [self._table.head(width)], classes="edge")
        yield Rows(lambda at, width: self._table.line(self._rows[at], width), id="list", empty="no step was seen yet")

    def update_rows(self) -> None:
        steps = list(self.view.steps)
        flagged = outliers(steps, model_of(self.view))
        self._table = table(self.view, flagged)
        self._rows = [r for r in reversed(steps) if not self.only_outliers or r.step in flagged]
        rows_of(self, "list").show(len(self._rows))

    def action_outliers(self) -> None:
        self.only_outliers = not self.only_outliers
        self.say("only outliers are listed" if self.only_outliers else "all steps are listed", "info")
        self.redraw()


PAGE = Steps
