"""Past the knee more rows make fewer tokens: back to the best number of rows that the cost of a step knows."""

from autotune.change import Change, Known
from autotune.window import Window
from engine.budget import Limits

LEAST_GAIN = 0.05
_SURE = 2.0  # times what the cost of a step is wrong by: a smaller gain may be none
_STEP = 2  # times fewer rows at once: far from where it has been the cost of a step is not known


def propose(window: Window, limits: Limits, known: Known) -> Change | None:
    rows = limits.max_num_seqs
    if window.running < 0.9 * rows and window.waiting_kv >= 1:  # fewer run than may: memory holds them back
        rows = round(window.running)
    if window.running < 0.9 * rows or rows < 2:
        return None
    best = max(known.best_rows(rows, limits.prefill_chunk), rows // _STEP)
    here, there = known.at(rows, limits.prefill_chunk), known.at(best, limits.prefill_chunk)
    if here is None or there is None:
        return None
    gain = there.tokens_per_s / here.tokens_per_s - 1
    if best >= rows or gain < max(LEAST_GAIN, _SURE * known.cost_error):
        return None
    return Change(
        changes={"max_num_seqs": best},
        why=f"{rows} rows are past the knee: {best} would give {gain:.0%} more tokens per second",
        evidence={"running": window.running, "tokens_per_s": window.tokens_per_s},
        predicted={"goodput": window.goodput * (1 + gain), "gain": gain},
    )
