"""A request's life as a Gantt chart: its stages one under the other, its steps as ticks, its stalls marked.

Pure: a record (or a running request) and the steps seen of it in, lines out. Enter at `gantt`, `ticks`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from telemetry.events import STAGES, RequestRecord
from tui.palette import FILLS
from tui.text import Line, line, nanoseconds, pad, percent, right
from tui.timeline import Piece

_NAME: Final = 13
_FIGURES: Final = 17
_ENGINE: Final = ("queue", "prefill", "prefill_wait", "decode", "preempted")  # the stages that the engine times
_STALL_RATIO: Final = 4  # a gap this many times the usual one is a stall


def gantt(record: RequestRecord, pieces: Sequence[Piece], width: int) -> list[Line]:
    """The stages between arrival and end, then what was computed when."""
    cells = max(10, width - _NAME - _FIGURES - 2)
    whole_ns = max(1, record.at_ns - record.arrival_ns)
    passed = stages(record)
    lines: list[Line] = []
    for index, stage in enumerate(name for name in STAGES if record.stages.get(name)):
        spent_ns = record.stages[stage]
        bars = _bars([(start, length) for name, start, length in passed if name == stage], whole_ns, cells)
        figures = right(nanoseconds(spent_ns), 9) + right(percent(spent_ns / whole_ns), 6)
        lines.append(line(" ", (pad(stage, _NAME), "label"), (bars, f"ink{index % FILLS}"), figures))
    return [*lines, *ticks(record.arrival_ns, record.at_ns, pieces, cells)]


def stages(record: RequestRecord) -> list[tuple[str, int, int]]:
    """(stage, start, length) in ns from arrival, as they passed; where the engine's pieces are not known, or do not sum
    to its stages, each stage is one piece, in the order of the partition."""
    inside = {stage for stage, _, _ in record.pieces}
    whole = sum(record.stages.get(stage, 0) for stage in _ENGINE)
    if sum(ns for _, ns, _ in record.pieces) == whole and inside <= set(_ENGINE):
        before = [(stage, record.stages.get(stage, 0)) for stage in STAGES[: STAGES.index(_ENGINE[0])]]
        after = [(stage, record.stages.get(stage, 0)) for stage in STAGES[STAGES.index(_ENGINE[-1]) + 1 :]]
        order = [*before, *((stage, ns) for stage, ns, _ in record.pieces), *after]
    else:
        order = [(stage, record.stages.get(stage, 0)) for stage in STAGES]
    passed, at_ns = [], 0
    for stage, length in order:
        if length:
            passed.append((stage, at_ns, length))
        at_ns += length
    return passed


def _bars(parts: Sequence[tuple[int, int]], whole_ns: int, cells: int) -> str:
    """What is there has at least one cell."""
    row = [" "] * cells
    for start, length in parts:
        at = min(cells - 1, int(start / whole_ns * cells))
        end = min(cells, max(at + 1, round((start + length) / whole_ns * cells)))
        row[at:end] = "█" * (end - at)
    return "".join(row)


def ticks(start_ns: int, end_ns: int, pieces: Sequence[Piece], cells: int) -> list[Line]:
    """One line for prompt chunks, one for decode steps with stalls; nothing if no step of it was seen."""
    if not pieces:
        return []
    chunks = [piece for piece in pieces if piece.prompt]
    decodes = [piece for piece in pieces if not piece.prompt]
    stalls = stalled(decodes)
    lines = []
    if chunks:
        tokens = sum(piece.count for piece in chunks)
        row = _marks([(piece, "▌") for piece in chunks], start_ns, end_ns, cells)
        lines.append(_ticks("chunks", row, f"{len(chunks)} of {tokens} tok"))
    if decodes:
        row = _marks([(p, "!" if p in stalls else "╷") for p in decodes], start_ns, end_ns, cells)
        longest_ns = max((gap for gap in _gaps(decodes)), default=0)
        lines.append(_ticks("steps", row, f"{len(stalls)} stalls"))
        lines.append(
            line(" ", (pad("", _NAME), ""), (f"longest gap {nanoseconds(longest_ns)}; ! follows a stall", "dim"))
        )
    return lines


def _ticks(name: str, row: str, figures: str) -> Line:
    return line(" ", (pad(name, _NAME), "label"), row, right(figures, _FIGURES - 2))


def stalled(decodes: Sequence[Piece]) -> list[Piece]:
    """Steps that came much later after the one before than the median step of this request did."""
    gaps = _gaps(decodes)
    if len(gaps) < 3:
        return []
    usual_ns = sorted(gaps)[len(gaps) // 2]
    return [piece for piece, gap in zip(decodes[1:], gaps, strict=True) if gap > _STALL_RATIO * usual_ns]


def _gaps(pieces: Sequence[Piece]) -> list[int]:
    return [after.at_ns - before.at_ns for before, after in pairwise(pieces)]


def _marks(pieces: Sequence[tuple[Piece, str]], start_ns: int, end_ns: int, cells: int) -> str:
    """Stalls are drawn over steps, not under them."""
    row = ["·"] * cells
    whole_ns = max(1, end_ns - start_ns)
    for piece, mark in sorted(pieces, key=lambda pair: pair[1] == "!"):
        at = min(cells - 1, max(0, int((piece.at_ns - start_ns) / whole_ns * cells)))
        row[at] = mark
    return "".join(row)
