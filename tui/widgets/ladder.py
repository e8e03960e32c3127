"""Stacked bars: shares of one whole side by side, each named inside its own segment; and the memory ladder as such a
bar, with its watermark and its hard line.

Pure: amounts in, lines out. The smallest share that is there keeps one cell, so that nothing is hidden. Enter at
`stacked`, `legend`, `ladder`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tui.palette import FILLS
from tui.text import Line, clip, line, pad, percent, wrapped

WATERMARK: Final = 0.70  # of the limit: above it, admission holds back
HARD_LINE: Final = 0.85  # the planned most
_RESERVE: Final = ("kv_cached", "kv_free", "allocator_cache", "headroom")  # not in use: drawn as spare room


def widths(amounts: Sequence[float], width: int) -> list[int]:
    """Cells of each amount: they sum to `width`, in proportion; what is there has at least one while there is room."""
    total = sum(amounts)
    if total <= 0 or width <= 0:
        return [0] * len(amounts)
    cells = [max(1, int(amount / total * width)) if amount > 0 else 0 for amount in amounts]
    while (over := sum(cells) - width) != 0:
        if over > 0:
            largest = max(range(len(cells)), key=lambda i: cells[i])
            cells[largest] -= 1
        else:
            short = max(range(len(cells)), key=lambda i: amounts[i] / total * width - cells[i])
            cells[short] += 1
    return cells


def stacked(amounts: Mapping[str, float], width: int, spare: Sequence[str] = ()) -> Line:
    """One bar of `width` cells; names in `spare` are drawn as empty room."""
    fills = {name: index % FILLS for index, name in enumerate(amounts)}
    names = [name for name, amount in amounts.items() if amount > 0]
    total = sum(amounts[name] for name in names)
    if not names:
        return line((pad(" nothing yet", width), "spare"))
    spans = []
    for name, cells in zip(names, widths([amounts[n] for n in names], width), strict=True):
        label = f" {name} {percent(amounts[name] / total)}"
        text = label if len(label) < cells else f" {name}" if len(name) + 1 < cells else ""
        spans.append((pad(text, cells), "spare" if name in spare else f"fill{fills[name]}"))
    return tuple(spans)


def legend(
    amounts: Mapping[str, float], width: int, write: Callable[[float], str], spare: Sequence[str] = ()
) -> list[Line]:
    """Name and figure of each amount, in the bar's order and colours, which are its place's among `amounts`."""
    known = [(name, f"ink{index % FILLS}") for index, name in enumerate(amounts) if amounts[name] > 0]
    names = [name for name, _ in known]
    inks = ["dim" if name in spare else ink for name, ink in known]
    return wrapped(
        (
            line(("■ ", ink), name, (f" {write(amounts[name])}", "strong"))
            for name, ink in zip(names, inks, strict=True)
        ),
        width,
    )


def ordered(owners: Mapping[str, int]) -> dict[str, float]:
    """In use first, then what is reclaimable, then room: so that the bar's lit part ends where use ends."""
    used = {name: float(amount) for name, amount in owners.items() if name not in _RESERVE}
    spare = {name: float(owners[name]) for name in _RESERVE if owners.get(name, 0) > 0}
    return used | spare


def ladder(owners: Mapping[str, int], width: int, limit_bytes: int | None) -> list[Line]:
    """The bar of all owners, and under it the lines that admission and the planner keep."""
    bar = (" ", ""), *stacked(ordered(owners), width - 2, _RESERVE)
    if not limit_bytes:
        return [bar, line((" no limit is known: the bar is what is booked", "dim"))]
    return [bar, ruler(width)]


def ruler(width: int) -> Line:
    """Where watermark and hard line are under a bar of `width` - 2 cells."""
    at = [1 + int(share * (width - 2)) for share in (WATERMARK, HARD_LINE)]
    row = " " * at[0] + pad("▲ 70 % watermark", at[1] - at[0]) + "▲ 85 % hard line"
    if at[1] - at[0] < 18:
        row = " " * at[0] + pad("▲ 70 %", at[1] - at[0]) + "▲ 85 %"
    return line((clip(row, width), "dim"))


def spare_names() -> Sequence[str]:
    """Owners that are reserve or room, not use."""
    return _RESERVE
