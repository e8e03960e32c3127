"""A wrong profile is left in large steps: while far more waits than runs and the memory is hardly used, all limits are
scaled together, as one change."""

from autotune.change import Change, Known
from autotune.window import Window
from engine.budget import Limits

FACTOR = 4
_SCALED = ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "max_partial_prefills")


def propose(window: Window, limits: Limits, known: Known) -> Change | None:
    rows = limits.max_num_seqs
    far = min(known.memory_rows, known.space.bounds("max_num_seqs")[1])
    if window.waiting < rows or window.running < 0.8 * rows or far < 2 * rows:
        return None
    factor = min(FACTOR, far / rows)
    here, there = known.at(rows, limits.prefill_chunk), known.at(rows * factor, limits.prefill_chunk * factor)
    if here is None or there is None or there.tokens_per_s < 1.25 * here.tokens_per_s:
        return None
    if not known.in_time(int(rows * factor), int(limits.prefill_chunk * factor)):
        return None
    gain = there.tokens_per_s / here.tokens_per_s - 1
    return Change(
        changes=known.space.clamped({name: int(getattr(limits, name) * factor) for name in _SCALED}),
        why=f"{window.waiting:.0f} wait and only {rows} may run: all limits {factor:.1f} times as large",
        evidence={"waiting": window.waiting, "running": window.running, "memory_rows": known.memory_rows},
        predicted={"goodput": window.goodput * (1 + gain), "gain": gain},
    )
