"""The app driven by keys and mouse on a recorded feed: what it asks, refuses, confirms, paints."""

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from telemetry.events import RequestView
from telemetry.parts import RequestsView
from telemetry.snapshot import Snapshot
from tests.tui.driving import StillFeed, picture, planted, recorded, settled, shown, text_of
from tui.app import pages
from tui.page import rows_of
from tui.view import Frame
from tui.widgets.lines import Board

SMALL = (80, 24)


def many(count: int, blocks: int = 0) -> Frame:
    """A snapshot with `count` live requests, some of whose fields nobody reports."""
    live = [
        RequestView(request_id=f"req-{n:05}", state="running" if n < 64 else "waiting", prompt_tokens=n)
        for n in range(count)
    ]
    return Frame(
        at_ns=1, snapshot=Snapshot(at_ns=10, unix_seconds=1.0, model="m", requests=RequestsView(live=live))
    )  # fmt: skip


async def test_every_screen_shows_that_nothing_is_reported() -> None:
    """A daemon that reports nothing but its name, as somebody else's server would: no zero is made up."""
    bare = Frame(at_ns=1, snapshot=Snapshot(at_ns=10, unix_seconds=1.0, model="foreign"))
    async with shown([bare], SMALL) as (app, pilot):
        for page in pages():
            await pilot.press(page.KEY)
            await pilot.pause()
            text = text_of(picture(app))
            assert "foreign" in text
            assert page.NAME in ("Requests", "Findings") or "not reported" in text or "–" in text
            assert " 0 tok" not in text and "0 %" not in text.replace("70 %", "").replace("100 %", "")
        await pilot.press("5")
        await settled(pilot, "what runs is not reported")


async def test_before_the_first_frame_and_without_a_daemon() -> None:
    async with shown([], SMALL) as (app, pilot):
        assert "connecting" in text_of(picture(app))
        app.take(Frame(at_ns=1, error="/run/x does not answer: refused"))
        text = await settled(pilot, "does not answer")
        assert "retrying" in text


async def test_a_daemon_that_comes_back_is_shown_again() -> None:
    frames = recorded("healthy")
    async with shown(frames[:-1], SMALL) as (app, pilot):
        end_ns = frames[-1].at_ns
        app.take(Frame(at_ns=end_ns + 9_000_000_000, error="gone"))
        await settled(pilot, "no answer for")
        app.take(Frame(at_ns=end_ns + 10_000_000_000, snapshot=frames[-1].snapshot))
        assert "ready" in await settled(pilot, "live")


async def test_a_silent_source_is_old_after_three_seconds() -> None:
    async with shown(recorded("healthy"), SMALL) as (app, pilot):
        app.desk.view.now_ns += 8_000_000_000
        app.redraw_age()
        assert "no answer for 8" in await settled(pilot, "shown is")


async def test_only_visible_rows_are_built_and_the_rest_on_scrolling() -> None:
    async with shown([], SMALL) as (app, pilot):
        await pilot.press("5")
        await pilot.pause()
        listed = rows_of(app.page_shown(), "list")
        before = listed.made
        app.take(many(2000))
        await settled(pilot, "2,000 requests")
        assert listed.made - before < 5 * 24
        await pilot.press("end")
        await settled(pilot, "req-01999")
        assert listed.made - before < 20 * 24


async def test_what_did_not_change_is_not_painted_again() -> None:
    frames = recorded("healthy")
    async with shown(frames, SMALL) as (app, pilot):
        board = app.screen.query_one("#overview", Board)
        painted = board.painted
        for _ in range(5):
            app.redraw_all()
            await pilot.pause()
        assert board.painted == painted
        app.take(Frame(at_ns=frames[-1].at_ns + 1, snapshot=many(3).snapshot))
        await pilot.pause()
        assert board.painted > painted


async def test_filter_sort_and_the_cursor_that_stays_on_its_request() -> None:
    async with shown([many(200)], SMALL) as (app, pilot):
        await pilot.press("5")
        await pilot.pause()
        await pilot.press("slash", *"00150", "enter")
        await settled(pilot, "1 requests by state  only '00150'")
        await pilot.press("escape")
        await settled(pilot, "200 requests")
        await pilot.press("s", "s", "s", "s")  # state, why, age, prompt
        text = await settled(pilot, "by prompt")
        assert text.index("req-00199") < text.index("req-00198")
        await pilot.press("r", "down", "down")
        await settled(pilot, "── req-00002")
        app.take(Frame(at_ns=5, snapshot=many(300).snapshot))
        await settled(pilot, "300 requests")
        assert "── req-00002" in text_of(picture(app))


async def test_enter_opens_the_stages_of_a_request_over_the_whole_screen() -> None:
    async with shown(recorded("healthy"), SMALL) as (_, pilot):
        await pilot.press("5")
        await pilot.pause()
        await pilot.press("end")
        assert "inside these" not in await settled(pilot, "TTFT")
        await pilot.press("enter")
        text = await settled(pilot, "inside these")
        assert "decode" in text and text.count("finished  ") == 1
        await pilot.press("escape")
        await pilot.pause()
        assert (await settled(pilot, "enter open")).count("finished  ") > 5


async def test_a_click_on_a_tab_and_on_a_title() -> None:
    async with shown([many(50)], SMALL) as (_, pilot):
        await pilot.click("#tabs", offset=(48, 0))
        await settled(pilot, "50 requests by state")
        await pilot.click("#head", offset=(25, 0))
        await settled(pilot, "by age")
        await pilot.click("#list", offset=(5, 3))
        await settled(pilot, "── req-00003")


async def test_abort_asks_first_and_shows_the_exact_route() -> None:
    feed = StillFeed()
    async with shown([many(3)], SMALL, feed) as (_, pilot):
        await pilot.press("5")
        await pilot.pause()
        await pilot.press("a")
        await settled(pilot, "POST /inferd/v1/abort/req-00000")
        await pilot.press("n")
        await pilot.pause()
        assert feed.posted == []
        await pilot.press("a")
        await settled(pilot, "Abort this request?")
        await pilot.press("y")
        await settled(pilot, "aborted: 1 choices")
        assert feed.posted == [("/inferd/v1/abort/req-00000", None)]


async def test_what_has_ended_cannot_be_aborted() -> None:
    feed = StillFeed()
    async with shown(recorded("healthy"), SMALL, feed) as (_, pilot):
        await pilot.press("5")
        await pilot.pause()
        await pilot.press("end", "a")
        await settled(pilot, "only a running or waiting request")
        assert feed.posted == []


async def test_the_tuner_is_set_after_a_question_and_a_refusal_is_shown() -> None:
    feed = StillFeed(refuse="501 Not Implemented: there is no tuner yet")
    async with shown(recorded("healthy"), SMALL, feed) as (_, pilot):
        await pilot.press("6")
        await pilot.pause()
        await pilot.press("f")
        await settled(pilot, 'POST /inferd/v1/tuner {"freeze": true}')
        await pilot.press("y")
        await settled(pilot, "there is no tuner yet")
        await pilot.press("s")
        await settled(pilot, "Set a limit")
        await pilot.press(*"max_num_seqs 8", "enter")
        await settled(pilot, "Set max_num_seqs?")
        await pilot.press("y")
        await pilot.pause(0.2)
        assert feed.posted[-1] == (
            "/inferd/v1/tuner",
            {"set": {"max_num_seqs": 8}, "why": "set in inferd top"},
        )
        await pilot.press("s")
        await settled(pilot, "Set a limit")
        await pilot.press(*"nonsense", "enter")
        await settled(pilot, "where NAME is one of")
        await pilot.press("p")
        await settled(pilot, "Pin limits as they are")
        await pilot.press(*"max_num_seqs, prefill_chunk", "enter")
        await settled(pilot, "Pin max_num_seqs, prefill_chunk?")
        await pilot.press("y")
        await pilot.pause(0.2)
        assert feed.posted[-1] == ("/inferd/v1/tuner", {"pin": ["max_num_seqs", "prefill_chunk"]})


def with_finding() -> list[Frame]:
    frames = recorded("trouble")
    last = frames[-1].snapshot
    assert last is not None
    shot = msgspec.structs.replace(last, findings=[planted(last.at_ns)])
    return [*frames[:-1], Frame(at_ns=frames[-1].at_ns, snapshot=shot)]


async def test_a_remedy_runs_after_its_exact_command_was_confirmed(tmp_path: Path) -> None:
    async with shown(with_finding(), SMALL, prefix=("echo", "inferd")) as (_, pilot):
        await pilot.press("7")
        await settled(pilot, "enter runs: inferd models list --json")
        await pilot.press("n")
        await settled(pilot, "enter runs: inferd models list")
        await pilot.press("enter")
        await settled(pilot, "Run this remedy?")
        await pilot.press("y")
        text = await settled(pilot, "inferd models list: done")
        assert "\n" in text


async def test_a_remedy_is_not_run_here_for_a_daemon_elsewhere() -> None:
    async with shown(with_finding(), SMALL, remote=True) as (_, pilot):
        await pilot.press("7")
        await pilot.pause()
        await pilot.press("enter")
        await settled(pilot, "run it there")


async def test_a_recording_offers_no_remedy() -> None:
    feed = StillFeed()
    feed.replayed = True
    async with shown(with_finding(), SMALL, feed) as (_, pilot):
        await pilot.press("7")
        await pilot.pause()
        await pilot.press("enter")
        await settled(pilot, "nothing to remedy")
        await pilot.press("left", "right_square_bracket")
        await pilot.pause()
        assert feed.moved == [-10.0, 60.0]


async def test_a_held_display_stays_and_catches_up() -> None:
    frames = recorded("healthy")
    async with shown(frames, SMALL) as (app, pilot):
        await pilot.press("space")
        await settled(pilot, "PAUSED")
        app.take(Frame(at_ns=frames[-1].at_ns + 1, snapshot=many(1).snapshot))
        await pilot.pause()
        assert app.desk.view.snapshot is frames[-1].snapshot
        await pilot.press("space")
        await pilot.pause()
        assert app.desk.view.snapshot is not frames[-1].snapshot


async def test_the_engine_is_asked_only_while_its_screen_is_shown() -> None:
    feed = StillFeed()
    async with shown([many(1)], SMALL, feed) as (_, pilot):
        for key, wanted in (("5", {"requests"}), ("3", {"blocks"}), ("1", set())):
            await pilot.press(key)
            await pilot.pause()
            assert feed.wanted[-1] == wanted


async def test_help_palette_and_a_picture(tmp_path: Path) -> None:
    async with shown(recorded("healthy"), SMALL, pictures=tmp_path) as (_, pilot):
        await pilot.press("question_mark")
        await settled(pilot, "keys and signs")
        await pilot.press("escape")
        await pilot.press("ctrl+p")
        await settled(pilot, "Show memory")
        await pilot.press("escape")
        await pilot.pause()
        await pilot.press("S")
        await settled(pilot, "saved")
        (saved,) = tmp_path.glob("*.svg")  # noqa: ASYNC240
        assert "TTFT" in text_of(saved.read_text(encoding="utf-8"))


async def test_no_color_is_honoured() -> None:
    """Not one colour in what the lines are painted with; bars alternate instead."""
    async with shown(recorded("healthy"), SMALL, environ={"NO_COLOR": "1"}) as (app, _):
        board = app.screen.query_one("#overview", Board)
        styles = [segment.style for y in range(board.size.height) for segment in board.render_line(y)]
        assert any(style is not None and style.reverse for style in styles)
        assert not any(style is not None and (style.color or style.bgcolor) for style in styles)


@pytest.mark.parametrize("size", [(80, 24), (60, 15), (240, 70)])
async def test_every_screen_fits_every_terminal(size: tuple[int, int]) -> None:
    async with shown(with_finding(), size) as (app, pilot):
        for page in pages():
            await pilot.press(page.KEY)
            await pilot.pause()
            lines = text_of(picture(app)).splitlines()
            assert len(lines) <= size[1]
            assert max(map(len, lines)) <= size[0]


async def test_a_key_is_answered_while_frames_pour_in() -> None:
    """2,000 requests a frame, many frames a second: the screen still changes, in no more than a few frames' time."""
    async with shown([], SMALL) as (app, pilot):

        async def pour() -> None:
            while True:
                app.take(many(2000))
                await asyncio.sleep(0.02)

        pouring = asyncio.create_task(pour())
        begin = time.monotonic()
        await pilot.press("5")
        await settled(pilot, "2,000 requests")
        pouring.cancel()
        assert time.monotonic() - begin < 30


def test_every_screen_has_a_key_of_its_own() -> None:
    keys: list[Any] = [page.KEY for page in pages()]
    assert keys == sorted(set(keys)) and len(keys) == 7
