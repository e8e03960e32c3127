"""The hard line moves with what is measured to be in use beside KV: fewer blocks may be active if that has grown, more
if blocks are waited for and less is in use than was planned."""

from autotune.change import Change, Known
from autotune.window import Window
from engine.budget import Limits

_SLACK = 0.95  # of the line, so that what else is in use may grow a little before the next change
_WORTH = 1.1
_NEAR = 0.9  # of the hard line is active: then it is what binds


def propose(window: Window, limits: Limits, known: Known) -> Change | None:
    low, most = known.space.bounds("kv_blocks")
    target = max(low, int(_SLACK * most))
    evidence: dict[str, float] = {
        "kv_blocks": limits.kv_blocks,
        "hard_line_blocks": most,
        "fixed_bytes": known.space.fixed_bytes,
    }
    if limits.kv_blocks > most:
        why = f"what is in use beside KV leaves {most} blocks below the hard line, and {limits.kv_blocks} may be active"
        return Change(changes={"kv_blocks": target}, why=why, goal="", evidence=evidence, urgent=True)
    binds = not limits.watermark_blocks or window.kv_peak > _NEAR * limits.kv_blocks  # else the watermark does
    if window.waiting_kv >= 1 and binds and target > _WORTH * limits.kv_blocks:
        why = f"{window.waiting_kv:.0f} wait for blocks, and the hard line allows {most} of them"
        return Change(
            changes={"kv_blocks": target}, why=why, goal="", evidence={**evidence, "waiting_kv": window.waiting_kv}
        )
    return None
