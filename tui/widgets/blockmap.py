"""The block map: every KV block, aggregated to the cells that can be seen.

Pure: the engine's map (a byte a block) in, lines out. A cell's glyph says how much of it is held, its colour what kind
of block is most of that. Enter at `blockmap`.
"""

from functools import lru_cache
from typing import Final

from tui.text import Line, Span, line

# A block's states as the engine's map writes them (engine/kv/pool.py).
FREE, CACHED, ACTIVE, SHARED = range(4)
STATES: Final = ("free", "cached", "active", "shared")
_FILL: Final = "·░▒▓█"
_INKS: Final = ("dim", "ink0", "ink1", "ink2")


def blockmap(states: bytes, width: int, height: int) -> list[Line]:
    """At most `height` lines of `width` cells, blocks in the order of their numbers."""
    cells = max(1, width * height)
    per_cell = max(1, -(-len(states) // cells))
    spans: list[list[Span]] = []
    for start in range(0, len(states), per_cell * width):
        row: list[Span] = []
        for at in range(start, min(start + per_cell * width, len(states)), per_cell):
            glyph, style = _cell(states[at : at + per_cell])
            if row and row[-1][1] == style:
                row[-1] = (row[-1][0] + glyph, style)
            else:
                row.append((glyph, style))
        spans.append(row)
    return [tuple(row) for row in spans]


def per_cell(blocks: int, width: int, height: int) -> int:
    """How many blocks one cell stands for."""
    return max(1, -(-blocks // max(1, width * height)))


@lru_cache(maxsize=4096)
def _cell(part: bytes) -> tuple[str, str]:
    """Glyph by the share that is not free; letters where one cell is one block would be noise. Kept: most
    cells of a map look like some other."""
    free = part.count(FREE)
    held = len(part) - free
    if not held:
        return _FILL[0], _INKS[FREE]
    level = 1 + min(3, int(held / len(part) * 4 - 1e-9))
    kind = max((CACHED, ACTIVE, SHARED), key=part.count)
    return _FILL[level], _INKS[kind]


def legend(states: bytes) -> Line:
    """How many blocks there are of each state."""
    known = [(name, states.count(index), _INKS[index]) for index, name in enumerate(STATES)]
    other = len(states) - sum(count for _, count, _ in known)
    spans: list[str | Span] = [" "]
    for name, count, ink in [*known, *([("other", other, "warning")] if other else [])]:
        spans += [("■ ", ink), f"{name} ", (f"{count:,}", "strong"), "   "]
    return line(*spans, (f"{_FILL[0]} none held  {_FILL[1]}{_FILL[2]}{_FILL[3]}{_FILL[4]} up to all", "dim"))
