"""Work that preemptions throw away is worth less than a shorter batch: fewer sequences run, so that each can end."""

from autotune.change import Change, Known
from autotune.window import Window
from engine.budget import Limits

WORTH = 0.1  # of the work done


def propose(window: Window, limits: Limits, known: Known) -> Change | None:
    done = window.output_tokens + window.prefill_tokens
    rows = max(1, min(limits.max_num_seqs - 1, int(0.8 * window.running)))
    if window.lost_tokens <= WORTH * done or window.running_peak < 2 or rows >= limits.max_num_seqs:
        return None
    return Change(
        changes={"max_num_seqs": rows},
        why=f"preemptions threw away {window.lost_tokens} computed positions of {done}",
        goal="lost_tokens",
        evidence={"lost_tokens": window.lost_tokens, "done_tokens": done, "running": window.running},
        predicted={"lost_tokens": 0.0},
        urgent=True,
    )
