"""Long requests leave half of the pool to the others: while one holds more than that and others are pushed out, longer
ones are bounded; when the pressure is gone they are let in again."""

from autotune.change import Change, Known
from autotune.space import LEAST_CONTEXT
from autotune.window import Window
from engine.budget import Limits

SHARE = 0.5


def propose(window: Window, limits: Limits, known: Known) -> Change | None:
    space = known.space
    line = space.watermark_blocks
    full = max(LEAST_CONTEXT, int(SHARE * line) * space.resolved.block_size)
    evidence = {"largest_blocks": window.largest_blocks, "kv_peak": window.kv_peak, "waiting_kv": window.waiting_kv}
    pressed = window.waiting_kv >= 1 or (window.kv_peak > line and window.running_peak > 1)
    if pressed and window.largest_blocks > SHARE * line and full < limits.context_limit:
        why = f"one request holds {window.largest_blocks} blocks, more than half of {line}, while others are pushed out"
        return Change(changes={"context_limit": full}, why=why, goal="kv_peak", evidence=evidence, urgent=True)
    ceiling = space.bounds("context_limit")[1]
    if limits.context_limit < ceiling and window.waiting_kv == 0 and window.kv_peak < SHARE * line:
        why = "the pressure on the pool is gone: long requests are let in again"
        return Change(changes={"context_limit": ceiling}, why=why, evidence=evidence)
    return None
