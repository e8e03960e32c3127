"""What tests of the TUI need: an app on a recorded feed with a clock that stands still, and its pictures as text."""

import html
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from telemetry.client import ClientError
from telemetry.events import Finding
from tui.app import Top
from tui.replay import Player, load
from tui.view import Frame

HERE = Path(__file__).parent
SECOND = 1_000_000_000
_CELL_WIDTH = 12.2  # of Rich's SVG
_TEXT = re.compile(r'<text class="[^"]*-r\d+" x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>')


class StillFeed:
    """A feed that brings nothing by itself; what is posted is kept, and answered or refused as told."""

    replayed = False

    def __init__(self, refuse: str = "") -> None:
        self.posted: list[tuple[str, Any]] = []
        self.wanted: list[frozenset[str]] = []
        self.moved: list[float] = []
        self._refuse = refuse

    def start(self, deliver: Callable[[Frame], None]) -> None: ...

    def stop(self) -> None: ...

    def want(self, parts: frozenset[str]) -> None:
        self.wanted.append(parts)

    def post(self, path: str, body: Any = None) -> Any:
        self.posted.append((path, body))
        if self._refuse:
            raise ClientError(self._refuse)
        return {"aborted_choices": 1}

    def seek(self, seconds: float) -> None:
        self.moved.append(seconds)

    def pause(self, paused: bool) -> None: ...


def recorded(name: str) -> list[Frame]:
    """The frames of a recorded feed, one a second, as a live feed would have brought them."""
    player = Player(load(HERE / f"{name}.jsonl"))
    frames = []
    for second in range(int(player.end - player.first) + 2):
        (frame,) = player.frames(min(player.end, player.first + second), second * SECOND)
        frames.append(Frame(at_ns=frame.at_ns, snapshot=frame.snapshot, events=frame.events))
    return frames


def planted(at_ns: int) -> Finding:
    """Made by hand, in the form in which a daemon's checks give them."""
    return Finding(
        at_ns=at_ns,
        runbook="planted",
        severity="critical",
        summary="the KV pool is full and sequences are preempted again and again",
        evidence={"kv in use": "98 %", "preempted": "31 in the last minute"},
        next_step="inferd models list --json",
        confidence=0.9,
    )


RUNBOOK = """# The KV pool is full

Sequences are **preempted** and computed again: work is lost.

## Remedies

```sh
inferd models list
inferd doctor do set kv_blocks=KV_CEILING
kubectl scale deployment/inferd --replicas=2
```
"""


@asynccontextmanager
async def shown(
    frames: list[Frame], size: tuple[int, int], feed: StillFeed | None = None, **given: Any
) -> AsyncIterator[tuple[Top, Pilot[None]]]:
    """The app with these frames taken, its clock at the last one's time."""
    app = Top(
        feed or StillFeed(),
        runbook=given.pop("runbook", lambda name: RUNBOOK if name == "planted" else None),
        environ=given.pop("environ", {}),
        now_ns=lambda: app.desk.view.now_ns,
        **given,
    )
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        for frame in frames:
            app.desk.view.take(frame)
        await pilot.pause()
        app.redraw_all()
        await pilot.pause()
        yield app, pilot


def picture(app: Top) -> str:
    """The screen as SVG."""
    return app.export_screenshot()


def text_of(svg: str) -> str:
    """An SVG's text as a grid of cells, without blanks at the ends of lines: what people read, and nothing of how."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in _TEXT.findall(svg):
        rows.setdefault(float(y), []).append((float(x), html.unescape(text).replace("\xa0", " ")))
    lines = []
    for y in sorted(rows):
        line = ""
        for x, text in sorted(rows[y]):
            line = line.ljust(round(x / _CELL_WIDTH)) + text
        lines.append(line.rstrip())
    return "\n".join(lines)


async def settled(pilot: Pilot[None], said: str) -> str:
    """Wait until the screen says `said`; its text."""
    for _ in range(600):
        text = text_of(picture(pilot.app))  # type: ignore[arg-type]
        if said in text:
            return text
        await pilot.pause(0.05)
    raise AssertionError(f"{said!r} is not on the screen:\n{text}")
