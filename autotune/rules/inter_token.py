"""The target between tokens is missed: smaller chunks of prompts if these make the steps long, else fewer rows."""

from autotune.change import Change, Known
from autotune.window import Window
from engine.budget import Limits


def propose(window: Window, limits: Limits, known: Known) -> Change | None:
    target, seen, cost = known.targets.inter_token_s, window.inter_token_p95_s, known.cost
    here = known.at(max(1.0, window.running), limits.prefill_chunk)
    if not target or seen is None or seen <= target or cost is None or here is None:
        return None
    evidence = {"inter_token_p95_s": seen, "target_s": target, "running": window.running}
    why = f"the gap between tokens is {seen:.3f} s at the 95th percentile, and the target {target:g} s"
    low = known.space.bounds("prefill_chunk")[0]
    if here.inter_token_s < 0.8 * target and cost.prefill_s > 0 and limits.prefill_chunk > low:
        chunk = max(low, int((0.85 * target - here.inter_token_s) / cost.prefill_s))
        if chunk < 0.95 * limits.prefill_chunk:
            predicted = {"inter_token_p95_s": here.inter_token_s + cost.prefill_s * chunk}
            return Change(
                changes={"prefill_chunk": chunk},
                why=why,
                goal="inter_token_p95_s",
                evidence=evidence,
                predicted=predicted,
            )
    rows = max(1, int(0.8 * window.running))
    while rows > 1 and not known.in_time(rows, limits.prefill_chunk):
        rows -= 1
    if rows >= limits.max_num_seqs or window.running_peak < 2:
        return None
    there = known.at(rows, limits.prefill_chunk)
    predicted = {"inter_token_p95_s": there.inter_token_s} if there else {}
    return Change(
        changes={"max_num_seqs": rows}, why=why, goal="inter_token_p95_s", evidence=evidence, predicted=predicted
    )
