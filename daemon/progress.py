"""Progress on standard error: a bar on a terminal, plain lines elsewhere.

It must not know what is going on; it is told a name and a share. Enter at `Progress`; leave it by `done`.
"""

import sys
import time
from typing import Any, TextIO

import click

_SILENT_S = 2.0  # what is over sooner than this is worth one line only
_STEP = 0.25  # of the work, between two plain lines
_WIDTH = 30


class Progress:
    """Call it with (what, share). A new `what` ends the line of the one before."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._what = ""
        self._began_s = 0.0
        self._next = 0.0
        self._bar: Any = None

    def __call__(self, what: str, share: float) -> None:
        """`share` of `what` is done, 0 to 1; 0 also where it cannot be known."""
        if what != self._what:
            self.done()
            self._what, self._began_s, self._next = what, time.monotonic(), 0.0
        if self._terminal:
            self._draw(what, share)
        elif share >= self._next:
            self._line(what, share)

    def done(self) -> None:
        """Ends the current line. Call it before anything else is printed."""
        if self._bar is not None:
            self._bar.render_finish()
            self._bar = None
        self._what = ""

    def _draw(self, what: str, share: float) -> None:
        if self._bar is None:
            self._bar = click.progressbar(length=1000, label=what, width=_WIDTH, show_pos=False, file=self._stream)
            self._bar.render_progress()
        self._bar.update(int(share * 1000) - self._bar.pos)

    def _line(self, what: str, share: float) -> None:
        if self._next == 0:
            click.echo(f"{what} …", file=self._stream)
        elif share >= 1 or time.monotonic() - self._began_s >= _SILENT_S:
            click.echo(f"{what}: {share:.0%}", file=self._stream)
        self._next = (share // _STEP + 1) * _STEP
