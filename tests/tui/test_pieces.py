"""The pure parts: notation, bars, charts, block map, Gantt, table, timelines, remedies."""

import struct

import pytest

from telemetry.events import RequestRecord, StepReport
from tests.tui.driving import RUNBOOK, planted
from tui import text
from tui.palette import Palette
from tui.remedies import commands, run
from tui.rowtable import TABLE, Row
from tui.screens.steps import outliers
from tui.timeline import Piece, Timelines
from tui.widgets import blockmap, gantt, ladder, spark


def record(**changed: object) -> RequestRecord:
    facts: dict[str, object] = {
        "at_ns": 1_000_000_000,
        "request_id": "c-1",
        "group_id": "g",
        "index": 0,
        "model": "m",
        "operation": "chat",
        "stream": True,
        "arrival_ns": 0,
        "stages": {"queue": 200_000_000, "prefill": 300_000_000, "decode": 500_000_000},
        "reason": "stop",
        **changed,
    }
    return RequestRecord(**facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (None, "–"),
        (0, "0 s"),
        (0.00000042, "0 µs"),
        (0.00087, "870 µs"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (9.996, "10.0 s"),
        (99.6, "1m40s"),
        (10920, "3h02m"),
        (446400, "5d04h"),
    ],
)
def test_durations(seconds: float | None, written: str) -> None:
    assert text.duration(seconds) == written


def test_what_is_not_reported_is_never_zero() -> None:
    for write in (
        text.duration,
        text.size,
        text.count,
        text.rate,
        text.percent,
        text.clock,
        text.nanoseconds,
        text.age,
    ):
        assert write(None) == "–"
    assert (text.percent(0.001), text.percent(0)) == ("<1 %", "0 %")


def test_sizes_keep_three_digits() -> None:
    assert [text.size(n) for n in (0, 1023, 1024, 1023 << 10, 5 << 30, -(3 << 20))] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.00 MiB",
        "5.00 GiB",
        "-3.00 MiB",
    ]


def test_lines_are_fitted_to_cells_and_never_hold_what_a_terminal_obeys() -> None:
    fitted = text.fit(text.line("名前", ("\x1b[2Jid\n", "strong")), 6)
    assert text.width_of(fitted) == 6
    assert "\x1b" not in text.plain(fitted) and "\n" not in text.plain(fitted)
    assert text.clip("名前名前", 5) == "名前…"


def test_a_rule_has_the_width_it_is_given() -> None:
    for width in (40, 80, 160):
        assert text.width_of(text.rule("Title", width, "a note")) == width
        assert text.width_of(text.rule("Title", width)) == width


def test_the_smallest_share_keeps_a_cell_and_the_bar_its_width() -> None:
    assert ladder.widths([97, 1, 1, 1], 20) == [17, 1, 1, 1]
    for width in range(4, 200, 7):
        assert sum(ladder.widths([5, 0.001, 3, 90], width)) == width
    assert ladder.widths([0, 0], 10) == [0, 0]


def test_watermark_and_hard_line_stand_under_their_share_of_the_bar() -> None:
    drawn = ladder.ladder({"weights": 70, "headroom": 30}, 102, 100)
    bar, marks = (text.plain(row) for row in drawn)
    assert marks.index("▲") == 1 + 70 and marks.rindex("▲") == 1 + 85
    used = [span for span in drawn[0] if span[1].startswith("fill")]
    assert sum(map(len, (span[0] for span in used))) == 70
    assert "weights 70 %" in bar


def test_a_gap_in_a_live_line_is_a_gap() -> None:
    assert spark.spark([0, None, 1.0], 5) == "  ▁ █"
    lines = spark.chart([([None, None, 1.0, 1.0], "p50")], 11, 2, text.rate)
    assert [text.width_of(row) for row in lines] == [11, 11]
    assert text.plain(lines[0]).endswith("┤ ⠉")


def test_the_block_map_is_aggregated_to_the_cells_there_are() -> None:
    states = bytes([blockmap.ACTIVE] * 600 + [blockmap.FREE] * 19_400)
    lines = blockmap.blockmap(states, 50, 4)
    assert len(lines) == 4 and all(text.width_of(row) <= 50 for row in lines)
    assert text.plain(lines[0]).startswith("██████·")
    assert text.plain(blockmap.blockmap(bytes([1, 0, 0, 0]), 1, 1)[0]) == "░"
    assert "active 600" in text.plain(blockmap.legend(states))


def test_a_gantt_draws_stages_as_they_passed() -> None:
    """Pieces say that prefill was interrupted; without them, or if they do not sum, each stage is one bar."""
    pieces = (
        ("queue", 100_000_000, 0),
        ("prefill", 150_000_000, 64),
        ("queue", 100_000_000, 0),
        ("prefill", 150_000_000, 64),
        ("decode", 500_000_000, 0),
    )
    drawn = [text.plain(row) for row in gantt.gantt(record(pieces=pieces), (), 130)]
    assert [row.split()[0] for row in drawn] == ["queue", "prefill", "decode"]
    assert drawn[0].count("█ ") == 2, "two separate bars"
    assert len(gantt.stages(record(pieces=pieces[:2]))) == 3
    starts = [start for _, start, _ in gantt.stages(record(pieces=pieces))]
    assert starts == sorted(starts)


def test_stalls_are_what_came_much_later_than_usual() -> None:
    steps = [Piece(at, 10, 1, False) for at in (0, 10, 20, 30, 130, 140)]
    assert gantt.stalled(steps) == [steps[4]]
    drawn = [text.plain(row) for row in gantt.ticks(0, 140, [Piece(0, 0, 8, True), *steps], 40)]
    assert drawn[0].split()[0] == "chunks" and "1 stalls" in drawn[1] and "!" in drawn[1]
    assert gantt.ticks(0, 140, [], 40) == []


def step(number: int, rows: list[tuple[int, int, int]], **more: object) -> StepReport:
    packed = b"".join(struct.pack("<iii", *row) for row in rows)
    return StepReport(at_ns=number * 1000, step=number, rows=packed, **more)  # type: ignore[arg-type]


def test_a_row_belongs_to_whoever_was_admitted_to_it_last() -> None:
    lines = Timelines()
    lines.take(step(1, [(0, 0, 64), (1, 0, 8)], admitted=((0, "a"), (1, "b")), prefill_rows=2))
    lines.take(step(2, [(0, 64, 1), (1, 8, 1)], decode_rows=2, finished=("b",)))
    lines.take(step(3, [(0, 65, 1), (1, 0, 9)], admitted=((1, "c"),), decode_rows=1, prefill_rows=1))
    assert [(p.count, p.prompt) for p in lines.of("a")] == [(64, True), (1, False), (1, False)]
    assert [p.at_ns for p in lines.of("b")] == [1000, 2000]
    assert [p.count for p in lines.of("c")] == [9]
    assert lines.of("nobody") == []


def test_timelines_are_bounded() -> None:
    lines = Timelines()
    for number in range(2000):
        lines.take(step(number, [(number, 0, 1)], admitted=((number, f"r{number}"),)))
    assert lines.of("r0") == [] and len(lines.of("r1999")) == 1


def test_outliers_are_told_by_the_median() -> None:
    steps = [StepReport(at_ns=n, step=n, launch_ns=100) for n in range(20)] + [
        StepReport(at_ns=20, step=20, launch_ns=301),
        StepReport(at_ns=21, step=21, launch_ns=299),
    ]
    assert outliers(steps) == {20}


def test_sorting_puts_the_unknown_last_either_way() -> None:
    rows = [Row(request_id=str(n), state="running", output=n) for n in (3, 1)] + [Row(request_id="x", state="waiting")]
    assert [row.output for row in TABLE.ordered(rows, "output", True)] == [3, 1, None]
    assert [row.output for row in TABLE.ordered(rows, "output", False)] == [1, 3, None]
    assert TABLE.ordered(rows, "no such column", True) == rows


def test_every_table_line_has_the_width_of_the_head() -> None:
    row = Row(request_id="x" * 200, state="running", why="capacity of everything")
    for width in (80, 100, 160, 240):
        assert text.width_of(TABLE.head(width, "age")) <= width
        assert text.width_of(TABLE.line(row, width)) == text.width_of(TABLE.head(width))
        assert TABLE.column_at(3, width) == "state"


def test_remedies_are_inferds_own_commands_with_nothing_to_fill_in() -> None:
    assert commands(planted(0), RUNBOOK) == ["inferd models list --json", "inferd models list"]
    assert commands(planted(0), None) == ["inferd models list --json"]


def test_a_remedy_is_run_without_a_shell() -> None:
    status, output = run("inferd '$(id)'", ("echo", "inferd"))
    assert (status, output) == (0, "inferd $(id)")
    assert run("inferd x", ("/nowhere/inferd",))[0] == 1
    assert run("inferd INFERD_SOCKET", ("printenv",), "/run/it.sock") == (0, "/run/it.sock")


def test_without_colour_neighbours_in_a_bar_differ() -> None:
    plain = Palette(colour=False)
    assert all(plain[name].color is None and plain[name].bgcolor is None for name in ("p50", "critical", "fill0"))
    assert plain["fill0"] != plain["fill1"]
