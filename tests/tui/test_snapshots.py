"""Every screen from recorded feeds, at the smallest terminal and a large one, healthy and in trouble, against committed
SVGs. Compared is the text in its cells. If a change is meant: `python -m tests.tui.test_snapshots` draws them anew."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.tui.driving import HERE, picture, planted, recorded, settled, shown, text_of
from tui.app import pages
from tui.page import rows_of
from tui.view import Frame

SIZES = ((80, 24), (160, 50))
SHELF = HERE / "snapshots"
_AWAY_S = 14
SCREENS = [page.NAME.lower() for page in pages()]


def frames_of(name: str) -> list[Frame]:
    """The recording; in trouble with a finding that is planted by hand, and in the end the daemon does not answer."""
    frames = recorded(name)
    if name == "trouble":
        last = frames[-1]
        assert last.snapshot is not None
        found = planted(last.snapshot.at_ns)
        frames[-1] = Frame(
            at_ns=last.at_ns,
            snapshot=msgspec.structs.replace(last.snapshot, findings=[found]),
            events=(*last.events, found),
        )
    return frames


def gone(frames: list[Frame]) -> list[Frame]:
    """What comes when the daemon has been killed."""
    at_ns = frames[-1].at_ns + _AWAY_S * 1_000_000_000
    return [*frames, Frame(at_ns=at_ns, error="/run/inferd/control.sock does not answer: connection refused")]


def cases() -> list[tuple[str, str, tuple[int, int]]]:
    return [(screen, name, size) for screen in SCREENS for name in ("healthy", "trouble") for size in SIZES] + [
        ("overview", "gone", size) for size in SIZES
    ]


async def drawn(screen: str, name: str, size: tuple[int, int]) -> str:
    frames = gone(frames_of("trouble")) if name == "gone" else frames_of(name)
    async with shown(frames, size) as (app, pilot):
        app.action_page(screen)
        await pilot.pause()
        await pilot.pause()
        if screen == "requests" and name == "healthy":  # one that has ended, so that its stages are seen
            rows_of(app.page_shown(), "list").move_to(len(app.desk.view.live() or ()))
            await pilot.pause()
        if screen == "findings" and name == "trouble":
            await settled(pilot, "inferd models list\n")
        return picture(app)


def path_of(screen: str, name: str, size: tuple[int, int]) -> Path:
    return SHELF / f"{screen}-{name}-{size[0]}x{size[1]}.svg"


@pytest.mark.parametrize(("screen", "name", "size"), cases(), ids=lambda value: str(value).replace(", ", "x"))
async def test_the_screen_is_as_recorded(screen: str, name: str, size: tuple[int, int]) -> None:
    svg = await drawn(screen, name, size)
    assert text_of(svg) == text_of(path_of(screen, name, size).read_text(encoding="utf-8"))


def test_no_snapshot_is_left_over() -> None:
    assert {path.name for path in SHELF.glob("*.svg")} == {path_of(*case).name for case in cases()}


def test_the_text_of_a_picture_tells_a_change() -> None:
    """The comparison itself: another figure is another text."""
    svg = path_of("overview", "healthy", (80, 24)).read_text(encoding="utf-8")
    assert "smollm2" not in text_of(svg)
    assert text_of(svg.replace("inter-token", "inter-taken")) != text_of(svg)


if __name__ == "__main__":
    SHELF.mkdir(exist_ok=True)
    for each in cases():
        path_of(*each).write_text(asyncio.run(drawn(*each)), encoding="utf-8")
