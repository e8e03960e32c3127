"""Who waits for a row gets one, while that pays and the memory allows: up to the knee, and not past it. Whether it pays
is seen from where it leads to: one careful step of several is worth little."""

from autotune.change import GROWTH, Change, Known
from autotune.window import Window
from engine.budget import Limits

LEAST_GAIN = 0.03


def propose(window: Window, limits: Limits, known: Known) -> Change | None:
    rows = limits.max_num_seqs
    if window.waiting_capacity < 1 or window.running < 0.9 * rows:
        return None
    most = min(known.memory_rows, known.space.bounds("max_num_seqs")[1])
    best = known.best_rows(most, limits.prefill_chunk) if most > rows else rows
    to = min(best, max(rows + 1, int(GROWTH * rows)))
    here, there, far = (known.at(n, limits.prefill_chunk) for n in (rows, to, best))
    if best <= rows or here is None or there is None or far is None:
        return None
    gain, whole = (one.tokens_per_s / here.tokens_per_s - 1 for one in (there, far))
    if whole < LEAST_GAIN:
        return None
    return Change(
        changes={"max_num_seqs": to},
        why=f"{window.waiting_capacity:.0f} wait for a row; {to} rows would give {gain:.0%} more tokens per second",
        evidence={
            "waiting_capacity": window.waiting_capacity,
            "running": window.running,
            "rows_for_memory": most,
            "best": best,
        },
        predicted={"goodput": window.goodput * (1 + gain), "gain": gain},
    )
