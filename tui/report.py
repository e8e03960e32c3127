"""The plain report: what the overview says, once, for a terminal, a ticket or a script.

Pure; the same lines as the screens, without styles, and no Textual. Enter at `report`.
"""

from telemetry.snapshot import Snapshot
from tui.panels import header, overview
from tui.text import plain
from tui.view import Frame, View

_ROWS = 24


def report(snapshot: Snapshot, width: int) -> str:
    """Header and overview of one snapshot."""
    view = View()
    view.take(Frame(at_ns=0, snapshot=snapshot))
    lines = [header(view, width), *overview(view, width, _ROWS)]
    return "\n".join(plain(line) for line in lines)
