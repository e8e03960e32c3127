"""Above the watermark fewer sequences run: as many as would have stayed below it, by what each of them held."""

from autotune.change import Change, Known
from autotune.window import Window
from engine.budget import Limits


def propose(window: Window, limits: Limits, known: Known) -> Change | None:
    line = known.space.watermark_blocks
    if window.kv_peak <= line or window.running_peak < 2:
        return None
    rows = max(1, min(known.memory_rows, int(0.95 * window.running_peak * line / window.kv_peak)))
    if rows >= limits.max_num_seqs:
        return None
    return Change(
        changes={"max_num_seqs": rows},
        why=f"{window.kv_peak} blocks were active, and the watermark is at {line}",
        goal="kv_peak",
        evidence={"kv_peak": window.kv_peak, "watermark_blocks": line, "running_peak": window.running_peak},
        predicted={"kv_peak": window.kv_peak * rows / window.running_peak},
        urgent=True,
    )
