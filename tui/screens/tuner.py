"""Tuner: limits over time, decisions with evidence and verdict; freeze, release, pin, set a limit."""

import json
from typing import Any, ClassVar, Final

from textual.app import ComposeResult

from telemetry.client import ClientError
from telemetry.events import Decision, LimitsView
from tui.dialogs import Ask, Confirm
from tui.page import Page
from tui.text import NOT_REPORTED, UNKNOWN, Line, clock, count, line, pad, right, rule
from tui.view import View
from tui.widgets.lines import Board
from tui.widgets.spark import spark

_PATH: Final = "/inferd/v1/tuner"
_KNOBS: Final = LimitsView.__struct_fields__
# What was resolved at start bounds each, under the name that the machine's budget has for it.
_CEILINGS: Final = {
    "max_num_seqs": "rows",
    "max_num_batched_tokens": "step_tokens",
    "prefill_chunk": "step_tokens",
    "max_partial_prefills": "rows",
    "context_limit": "max_model_len",
}


def draw(view: View, width: int, height: int) -> list[Line]:
    """Limits with their history, who changed them, and the decisions."""
    above = limits(view, width)
    return [*above, *decisions(view, width, max(2, height - len(above)))]


def limits(view: View, width: int) -> list[Line]:
    """A row a limit: now, its ceiling, the reason for it, and how it moved."""
    now = view.snapshot.limits if view.snapshot else None
    if now is None:
        return [rule("Limits", width, NOT_REPORTED)]
    ceilings = (view.snapshot.ceilings if view.snapshot else None) or {}
    changes = list(view.limits)
    lines = [rule("Limits", width, f"{len(changes)} settings seen")]
    lines.append(
        line((pad(" limit", 25) + right("now", 9) + right("ceiling", 10) + "  over the changes seen", "label"))
    )
    room = max(0, width - 48)
    for knob in _KNOBS:
        moved = [float(getattr(value, knob)) for _, value, _ in changes]
        ceiling = ceilings.get(_CEILINGS.get(knob, knob))
        most = count(ceiling) if isinstance(ceiling, int) else UNKNOWN
        drawn = spark(moved, min(room, len(moved)))
        figures = right(count(getattr(now, knob)), 9) + right(most, 10)
        lines.append(line((pad(f" {knob}", 25), "label"), figures, "  ", (drawn, "p95")))
    if changes:
        at_ns, _, why = changes[-1]
        lines.append(line((f" last change {clock(view.unix(at_ns))} {why}", "dim")))
    return lines


def decisions(view: View, width: int, height: int) -> list[Line]:
    """Newest first: what was changed, what was seen, expected and got."""
    made = [note for note in reversed(view.notes) if isinstance(note, Decision)]
    lines = [rule("Decisions", width, f"{len(made)} seen")]
    for decision in made:
        change = f"{decision.knob} {count(decision.before)} → {count(decision.after)}"
        verdict = decision.verdict or "not judged yet"
        style = "warning" if decision.direction == "rollback" else "strong"
        lines.append(
            line(f" {clock(view.unix(decision.at_ns))} ", (pad(change, 38), style), f" {decision.rule}: {verdict}")
        )
        lines.append(line((f"          saw {_facts(decision.evidence)}; expected {_facts(decision.predicted)}", "dim")))
    if not made:
        lines.append(line((" none yet: the limits are as they were set", "dim")))
    return lines[:height]


def _facts(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items()) or UNKNOWN


class Tuner(Page):
    """One board; what is asked of the daemon is confirmed first."""

    NAME: ClassVar[str] = "Tuner"
    KEY: ClassVar[str] = "6"
    KEYS: ClassVar[tuple[tuple[str, str], ...]] = (
        ("f", "freeze"), ("l", "release"), ("p", "pin"), ("s", "set"),
    )  # fmt: skip
    BINDINGS: ClassVar = [
        ("f", "ask_tuner('freeze')", "Freeze the tuner: limits stay"),
        ("l", "ask_tuner('release')", "Release the tuner"),
        ("p", "pin", "Pin limits: the tuner leaves them alone"),
        ("s", "set", "Set a limit"),
    ]

    def body(self) -> ComposeResult:
        yield Board(lambda width, height: draw(self.view, width, height), id="tuner")

    def action_ask_tuner(self, what: str) -> None:
        self._confirmed(f"{what.capitalize()} the tuner?", {what: True})

    def action_pin(self) -> None:
        def given(text: str | None) -> None:
            names = (text or "").replace(",", " ").split()
            if not names:
                return
            if not set(names) <= set(_KNOBS):
                self._which("NAME …")
                return
            self._confirmed(f"Pin {', '.join(names)}?", {"pin": names})

        self.app.push_screen(Ask("Pin limits as they are", "NAME …, e.g. max_num_seqs prefill_chunk"), given)

    def action_set(self) -> None:
        def given(text: str | None) -> None:
            if not text:
                return
            name, _, value = text.replace("=", " ").partition(" ")
            if name not in _KNOBS or not value.strip().isdigit():
                self._which("NAME VALUE")
                return
            self._confirmed(f"Set {name}?", {"set": {name: int(value)}, "why": "set in inferd top"})

        self.app.push_screen(Ask("Set a limit", "NAME VALUE, e.g. max_num_seqs 32"), given)

    def _which(self, form: str) -> None:
        self.say(f"write {form}, where NAME is one of: {', '.join(_KNOBS)}", "warning")

    def _confirmed(self, question: str, body: dict[str, Any]) -> None:
        def decided(yes: bool | None) -> None:
            if yes:
                self.run_worker(lambda: self._post(body), thread=True)

        self.app.push_screen(Confirm(question, f"POST {_PATH} {_written(body)}"), decided)

    def _post(self, body: dict[str, Any]) -> None:
        try:
            answer = self.desk.feed.post(_PATH, body)
        except ClientError as error:
            self.app.call_from_thread(self.say, str(error), "critical")
        else:
            self.app.call_from_thread(self.say, f"done; {_after(answer)}")


def _after(answer: Any) -> str:
    """What the tuner is up to now, as its answer says."""
    status = answer.get("tuner") or {}
    said = f"the tuner is {status.get('state', 'of an unknown state')}"
    pinned = status.get("pinned")
    return f"{said}; it leaves alone: {', '.join(pinned)}" if pinned else said


def _written(body: dict[str, Any]) -> str:
    return json.dumps(body)


PAGE = Tuner
