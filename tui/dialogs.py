"""Dialogs over a screen: a question with the exact command, a value to enter, the help, a command's output.

It must not know what is done with an answer. Enter at any of the screens.
"""

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static


class Confirm(ModalScreen[bool]):
    """A question; `command` is shown exactly as it will be run. Only `y` says yes."""

    BINDINGS: ClassVar = [("y", "answer(True)", "Yes"), ("n,escape,q", "answer(False)", "No")]

    def __init__(self, question: str, command: str, note: str = "") -> None:
        super().__init__()
        self._parts = (question, command, note)

    def compose(self) -> ComposeResult:
        question, command, note = self._parts
        with Vertical(classes="dialog"):
            yield Static(question, markup=False, classes="question")
            yield Static(command, markup=False, classes="command")
            if note:
                yield Static(note, markup=False)
            yield Static("y  yes     n  no", markup=False, classes="keys")

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


class Ask(ModalScreen[str]):
    """One line of text; empty when it was left with escape."""

    BINDINGS: ClassVar = [("escape", "leave", "Leave")]

    def __init__(self, question: str, hint: str, value: str = "") -> None:
        super().__init__()
        self._question, self._hint, self._value = question, hint, value

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._question, markup=False, classes="question")
            yield Input(self._value, placeholder=self._hint)
            yield Static("enter  go on     escape  leave", markup=False, classes="keys")

    @on(Input.Submitted)
    def _given(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())

    def action_leave(self) -> None:
        self.dismiss("")


class Text(ModalScreen[None]):
    """A title and lines of text, to be read and left: the help, or what a command printed."""

    BINDINGS: ClassVar = [("escape,q,enter,question_mark", "dismiss", "Close")]

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._title, self._text = title, "\n".join(lines)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog tall"):
            yield Static(self._title, markup=False, classes="question")
            with VerticalScroll():
                yield Static(self._text, markup=False)
            yield Static("escape  close", markup=False, classes="keys")
