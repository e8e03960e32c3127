"""Who waits for a row gets one, while that pays and the memory allows: up to the knee, and not past it."""

from autotune.change import GROWTH, Change, Known
from autotune.window import Window
from engine.budget import Limits

LEAST_GAIN = 0.03


def propose(window: Window, limits: Limits, known: Known) -> Change | None:
    rows = limits.max_num_seqs
    if window.waiting_capacity < 1 or window.running < 0.9 * rows:
        return None
    most = min(known.memory_rows, known.space.bounds("max_num_seqs")[1], max(rows + 1, int(GROWTH * rows)))
    best = known.best_rows(most, limits.prefill_chunk) if most > rows else rows
    here, there = known.at(rows, limits.prefill_chunk), known.at(best, limits.prefill_chunk)
    if best <= rows or here is None or there is None:
        return None
    gain = there.tokens_per_s / here.tokens_per_s - 1
    if gain < LEAST_GAIN:
        return None
    return Change(
        changes={"max_num_seqs": best},
        why=f"{window.waiting_capacity:.0f} wait for a row; {best} rows would give {gain:.0%} more tokens per second",
        evidence={"waiting_capacity": window.waiting_capacity, "running": window.running, "rows_for_memory": most},
        predicted={"goodput": window.goodput * (1 + gain), "gain": gain},
    )
