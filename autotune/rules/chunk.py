"""Prompts come through too slowly, beside rows that decode: larger chunks, as far as the gap between tokens allows."""

from autotune.change import GROWTH, Change, Known
from autotune.window import Window
from engine.budget import Limits

LEAST_GAIN = 0.05


def propose(window: Window, limits: Limits, known: Known) -> Change | None:
    late = known.targets.ttft_s and window.ttft_p95_s is not None and window.ttft_p95_s > known.targets.ttft_s
    here = known.at(max(1.0, window.running), limits.prefill_chunk)
    chunk = min(int(GROWTH * GROWTH * limits.prefill_chunk), limits.max_num_batched_tokens)
    if here is None or here.mixed_share < 0.9 or chunk <= limits.prefill_chunk or window.waiting + window.running < 2:
        return None
    there = known.at(max(1.0, window.running), chunk)
    if there is None or not known.in_time(max(1, int(window.running)), chunk):
        return None
    gain = there.tokens_per_s / here.tokens_per_s - 1
    if gain < LEAST_GAIN and not late:
        return None
    return Change(
        changes={"prefill_chunk": chunk},
        why=f"prompts keep rows waiting: chunks of {chunk} tokens would give {gain:.0%} more tokens per second",
        goal="ttft_p95_s" if late else "goodput",
        evidence={"mixed_share": here.mixed_share, "running": window.running, "waiting": window.waiting},
        predicted={"goodput": window.goodput * (1 + gain), "gain": gain},
    )
