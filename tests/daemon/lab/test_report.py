"""Reports: a page that a real browser shows whole without fetching anything, and JSON that comes back as it was."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from daemon.commands.bench import command
from daemon.lab import record, shelf, svg
from daemon.lab.page import page
from daemon.lab.record import Report, ReportError
from tests.browser import PATIENCE_S, Talk, chromium, talking
from tests.daemon.lab import made
from tests.fakes.tiny_served import tiny_served
from tests.served import INFERD, ROOT

BOXES = """[...document.querySelectorAll('svg')]
    .map(drawn => [drawn.getBoundingClientRect().width, drawn.querySelectorAll('path,circle,rect').length])"""


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium: see .ci/packages.txt")
async def test_a_browser_shows_every_plot_and_fetches_nothing(tmp_path: Path) -> None:
    whole, sides = made.report(made.run(), made.run("long")), made.ablated()
    browser: subprocess.Popen[bytes] | None = None
    try:
        browser, debugger = await asyncio.to_thread(chromium, tmp_path / "profile")
        for name, report, plots in (("whole", whole, 22), ("sides", sides, 8)):
            target = tmp_path / f"{name}.html"
            shelf.keep(str(target), report)
            async with talking(debugger) as talk:
                await asyncio.wait_for(_shown(talk, target, plots), PATIENCE_S)
    finally:
        if browser is not None:
            browser.terminate()
            browser.wait(30)


async def _shown(talk: Talk, target: Path, plots: int) -> None:
    for part in ("Network", "Page", "Log", "Runtime"):
        await talk.ask(f"{part}.enable")
    await talk.ask("Page.navigate", url=target.as_uri())
    await talk.until("Page.loadEventFired")
    boxes = await talk.value(BOXES)
    assert len(boxes) >= plots - 4, boxes  # what nobody reported has no plot
    assert all(width > 300 and marks > 0 for width, marks in boxes), boxes
    assert await talk.value("document.querySelectorAll('b').length === document.querySelectorAll('b.yes').length")
    asked = [e["params"]["request"]["url"] for e in talk.events if e.get("method") == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith("data:")] == [target.as_uri()]
    assert not [e for e in talk.events if e.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")]


def test_json_comes_back_as_it_was(tmp_path: Path) -> None:
    report = made.ablated()
    shelf.keep(str(tmp_path / "a.html"), report)
    assert record.load(tmp_path / "a.json") == report


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "no report"), ('{"kind": 3}', "kind"), ('{"schema": 99}', "no report"), ("", "no report")],
)
def test_what_is_no_report_is_said_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ReportError, match=said):
        record.load(tmp_path / "a.json")


def test_another_schema_is_not_guessed_at() -> None:
    other = json.loads(record.encode(made.report())) | {"schema": 2}
    with pytest.raises(ReportError, match="has schema 2, this inferd reads 1"):
        record.decode(json.dumps(other), "a.json")


def test_the_schema_only_grows() -> None:
    """A report as the first version wrote it: whoever removes or renames a field breaks every kept report."""
    first = {
        "report": "schema kind title started_at model settings versions seeds machine runs effects verdicts notes",
        "run": "side repeat seed seconds settings figures series requests gaps marks limit_bytes notes",
        "request": "at_s kind prompt_tokens output_tokens cached_tokens ttft_s whole_s gap_s longest_gap_s error",
    }
    now = {"report": record.Report, "run": record.Run, "request": record.Request}
    for name, fields in first.items():
        assert set(fields.split()) <= set(now[name].__struct_fields__)


def test_words_of_others_are_text_and_not_markup() -> None:
    drawn = page(made.report())
    assert "<made up>" not in drawn
    assert "<b>past the knee" not in drawn


def test_a_page_without_any_run_is_still_a_page() -> None:
    empty = Report(kind="load", title="nothing", started_at="", model="m")
    assert "nothing" in page(empty)


def test_thinning_loses_no_peak() -> None:
    points = [(float(n), 100.0 if n == 5003 else 1.0) for n in range(20000)]
    kept = svg.thinned(points)
    assert len(kept) < 2500
    assert (5003.0, 100.0) in kept


def test_where_it_cannot_be_written_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    for target in (str(tmp_path / "none" / "a.html"), str(tmp_path / "a.txt")):
        done = CliRunner().invoke(command, ["load", "--report", target, "--url", "http://127.0.0.1:9"])
        assert isinstance(done.exception, ReportError)


def test_bench_and_server_count_the_same(tmp_path: Path) -> None:
    """A real daemon: the page has its memory and its limits, and both sides counted the same requests and tokens."""
    with tiny_served(tmp_path, "--max-num-seqs", "4") as served:
        target = tmp_path / "load.html"
        flags = ["--url", served.url, "--requests", "12", "--concurrency", "3", "--output-tokens", "20:40"]
        where = ["--socket", str(served.runtime / "control.sock"), "--report", str(target)]
        done = subprocess.run(
            [*INFERD, "bench", "load", *flags, *where, "--prompt-tokens", "60:200"],
            capture_output=True, text=True, cwd=ROOT, timeout=110,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    (run,) = record.load(tmp_path / "load.json").runs
    assert run.figures["requests"] == run.figures["server_requests"] == 12
    assert run.figures["output_tokens"] == run.figures["server_output_tokens"]
    assert run.figures["prompt_tokens"] == run.figures["server_prompt_tokens"]
    assert {"memory.weights", "memory.in use", "kv.active", "limits.max_num_seqs"} <= {s.name for s in run.series}
    assert run.settings["max_num_seqs"] == 4
    assert "Memory over time" in target.read_text()
