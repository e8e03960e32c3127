"""KV: the block map, fragmentation, and what the prefix cache saved or missed, and why."""

from typing import ClassVar

from textual.app import ComposeResult

from tui.page import Page
from tui.text import NOT_REPORTED, Line, count, line, pad, percent, right, rule, size
from tui.view import View
from tui.widgets.blockmap import blockmap, legend, per_cell
from tui.widgets.lines import Board
from tui.widgets.spark import spark


def draw(view: View, width: int, height: int) -> list[Line]:
    """Figures above, the map in all the room that is left."""
    above = [*pool(view, width), *prefix(view, width)]
    return [*above, *blocks(view, width, max(3, height - len(above)))]


def pool(view: View, width: int) -> list[Line]:
    """How full the pool is, and how much of what is held is waste."""
    kv = view.snapshot.kv if view.snapshot else None
    if kv is None or kv.active is None:
        return [rule("Pool", width, NOT_REPORTED)]
    total = sum(n or 0 for n in (kv.active, kv.cached, kv.free))
    limits = view.snapshot.limits if view.snapshot else None
    usable = min(total, limits.kv_blocks) if limits else total
    bound = f"; the limit lets {count(usable)} be used" if usable < total else ""
    whole = f"{count(total)} blocks of {count(kv.block_size)} tokens, {size(kv.block_bytes)} each{bound}"
    lines = [rule("Pool", width, whole)]
    room = max(0, width - 40)
    for name, value in (("active", kv.active), ("cached", kv.cached), ("free", kv.free)):
        whole_of = usable if name == "active" else total
        share = right(percent((value or 0) / whole_of if whole_of else None), 8)
        drawn = spark(view.values("kv"), room, 1.0) if name == "active" else ""
        lines.append(line((pad(f" {name}", 15), "label"), right(count(value), 12), share, "   ", (drawn, "p95")))
    waste = (("tail waste", kv.tail_ratio, "tail", "of held slots are the empty ends of last blocks"),
             ("stranded", kv.stranded_ratio, "stranded", "of blocks nobody can get at now"))  # fmt: skip
    for label, ratio, _, why in waste:
        lines.append(line((pad(f" {label}", 15), "label"), right(percent(ratio), 20), (f"   {why}", "dim")))
    return lines


def prefix(view: View, width: int) -> list[Line]:
    """Prompt tokens that were found in the cache, and why the others were not."""
    kv = view.snapshot.kv if view.snapshot else None
    if kv is None or kv.hit_tokens is None:
        return [rule("Prefix cache", width, NOT_REPORTED)]
    parts = (
        ("hit", kv.hit_tokens, "computed once, used again"),
        ("miss", kv.miss_tokens, "not there: never seen, or evicted"),
        ("too short", kv.too_short_tokens, "shared, but shorter than a block: cannot be reused"),
    )
    total = sum(value or 0 for _, value, _ in parts)
    lines = [rule("Prefix cache", width, f"{count(total)} prompt tokens looked up")]
    for name, value, why in parts:
        share = right(percent((value or 0) / total) if total and value is not None else "–", 8)
        lines.append(line((pad(f" {name}", 15), "label"), right(count(value), 12), share, (f"   {why}", "dim")))
    return lines


def blocks(view: View, width: int, height: int) -> list[Line]:
    """The map."""
    states = view.snapshot.kv.block_map if view.snapshot and view.snapshot.kv else None
    if states is None:
        why = "the engine did not answer" if view.snapshot else "no daemon yet"
        return [rule("Block map", width, NOT_REPORTED), line((f" {why}", "dim"))]
    rows, columns = height - 2, width - 2
    each = per_cell(len(states), columns, rows)
    title = rule("Block map", width, f"{count(len(states))} blocks, {each} a cell" if each > 1 else "a cell a block")
    return [title, legend(states), *(line(" ", *row) for row in blockmap(states, columns, rows))]


class Kv(Page):
    """One board over the whole screen; the map comes from the engine while it is shown."""

    NAME: ClassVar[str] = "KV"
    KEY: ClassVar[str] = "3"
    WANTS: ClassVar[frozenset[str]] = frozenset({"blocks"})

    def body(self) -> ComposeResult:
        yield Board(lambda width, height: draw(self.view, width, height), id="kv")


PAGE = Kv
