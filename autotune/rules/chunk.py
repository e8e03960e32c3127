"""Prompts come through too slowly, beside rows that decode: larger chunks, as far as the gap between tokens allows."""

from autotune.change import GROWTH, Change, Known
from autotune.window import Window
from engine.budget import Limits

LEAST_GAIN = 0.03
_BUSY = 0.9  # of the steps carry a prompt: then who waits for a first token waits for chunks
_ENOUGH = 0.99  # of the best rate: smaller chunks that give so much are kinder to those who decode, and to memory


def propose(window: Window, limits: Limits, known: Known) -> Change | None:
    rows, now = max(1.0, window.running), limits.prefill_chunk
    here, ttft_s = known.at(rows, now), window.ttft_p95_s
    if here is None or window.waiting + window.running < 2:
        return None
    rates = {
        chunk: there.tokens_per_s
        for chunk in _larger(now, limits.max_num_batched_tokens)
        if known.in_time(max(1, int(rows)), chunk) and (there := known.at(rows, chunk))
    }
    if not rates:
        return None
    chunk = min(chunk for chunk, rate in rates.items() if rate >= _ENOUGH * max(rates.values()))
    gain = rates[chunk] / here.tokens_per_s - 1
    late = known.targets.ttft_s and ttft_s and ttft_s > known.targets.ttft_s and here.mixed_share > _BUSY
    if gain < LEAST_GAIN and not late:
        return None
    return Change(
        changes={"prefill_chunk": chunk},
        why=f"prompts keep rows waiting: chunks of {chunk} tokens would give {gain:.0%} more tokens per second",
        goal="ttft_p95_s" if late else "goodput",
        evidence={"mixed_share": here.mixed_share, "running": window.running, "waiting": window.waiting},
        predicted={"goodput": window.goodput * (1 + gain), "gain": gain},
    )


def _larger(chunk: int, most: int) -> list[int]:
    """Each twice as large as the one before and a bit, up to `most`. What a step costs is known for all of them: steps
    without decoding rows have been that large."""
    found = []
    while chunk < most:
        chunk = min(most, int(GROWTH * GROWTH * chunk))
        found.append(chunk)
    return found
