"""The KV cache is full: requests wait for blocks, or lose them and are computed again."""

from collections import Counter

from runbooks.check import finding
from runbooks.evidence import Evidence
from telemetry.events import Finding, StepReport

_THRASH_RATIO = 0.05  # of the granted tokens repeat what preemption threw away
_LEAST_PREEMPTIONS = 3
_FULL_RATIO = 0.9  # of the blocks that may be active
_LINE_RATIO = 0.75  # of those below the watermark: what the others are going to need is kept for them
_UNREAD_SECONDS = 5.0
_LEAST_REPORTS = 5
_HELD_RATIO = 0.5  # of the active blocks, from which on others soon feel it
_EXPLAINS = ("ttft_spike", "slow_decode", "overload", "short_answers", "low_throughput")
_WAITING_SHARE = 0.5  # of the reports: a pool that is full for a moment is well used


def check(evidence: Evidence) -> Finding | None:
    """What clients hold that do not read comes first where it is most of what is held: fewer at once would not help."""
    steps = evidence.steps
    if not steps:
        return None
    unread = _unread(evidence, steps)
    return unread if unread and unread.severity == "warning" else _full(evidence, steps) or unread


def _unread(evidence: Evidence, steps: list[StepReport]) -> Finding | None:
    """Blocks are held by requests whose clients do not read; a moment of that is nothing."""
    newest = [step for step in steps if evidence.at_ns - step.at_ns <= _UNREAD_SECONDS * 1e9]
    least = min((step.kv_stranded_blocks for step in newest), default=0)
    if len(newest) < _LEAST_REPORTS or not least:
        return None
    active = max(1, steps[-1].kv_active)
    return finding(
        evidence,
        "kv_pressure",
        "info" if least < _HELD_RATIO * active else "warning",
        f"{least} blocks ({least / active:.0%} of those in use) are held by requests whose clients do not read",
        confidence=0.85,
        next_step="inferd doctor runbook kv_pressure clients-that-do-not-read",
        section="clients-that-do-not-read",
        explains=_EXPLAINS if least >= _HELD_RATIO * active else (),
        held=f"{least} of {active} active blocks, in each of the last {len(newest)} reports",
    )


def _full(evidence: Evidence, steps: list[StepReport]) -> Finding | None:
    kv = evidence.snapshot.kv
    lost = [each for step in steps for each in step.preemptions]
    recompute = sum(step.recompute_tokens for step in steps)
    granted = recompute + sum(step.prefill_tokens + step.decode_tokens + step.draft_tokens for step in steps)
    ratio = recompute / granted if granted else 0.0
    waiting = sum(step.waiting_kv > 0 for step in steps) / len(steps)
    blocks, line = _room(evidence, steps[-1])
    full = max((step.kv_active / blocks for step in steps), default=0.0) if blocks else 0.0
    thrash = len(lost) >= _LEAST_PREEMPTIONS and ratio >= _THRASH_RATIO
    if not thrash and not (waiting >= _WAITING_SHARE and full >= (_LINE_RATIO if line else _FULL_RATIO)):
        return None
    lowered = _lowered(evidence)
    causes = Counter(each.cause for each in lost)
    section = "the-limit-is-below-the-ceiling" if lowered and not line else "fewer-at-once"
    tokens_lost = sum(each.tokens_lost for each in lost)
    which = "blocks below the watermark" if line else "allowed blocks"
    return finding(
        evidence,
        "kv_pressure",
        "warning",
        f"the KV cache is too small for what runs: {ratio:.0%} of the work is done again"
        if thrash
        else "requests wait because the KV cache is full" + (" up to the memory watermark" if line else ""),
        confidence=0.95 if thrash else 0.8,
        next_step=f"inferd doctor runbook kv_pressure {section}",
        section=section,
        explains=_EXPLAINS,
        preemptions=", ".join(f"{cause} × {count}" for cause, count in causes.items()) or "none in this minute",
        lost_work=f"{tokens_lost} computed positions; {recompute} of {granted} granted tokens were repeats",
        pool=f"{full:.0%} of the {blocks} {which} active at most; {waiting:.0%} of the reports had some waiting",
        cached="not reported" if kv is None else f"{kv.cached} blocks (reclaimed before anything is preempted)",
        limit=lowered or "at its ceiling",
    )


def _room(evidence: Evidence, last: StepReport) -> tuple[int, bool]:
    """How many blocks may be active, and whether it is the watermark that says so."""
    limits = evidence.snapshot.limits
    if limits is None:
        return last.kv_active + last.kv_cached + last.kv_free, False
    line = 0 < limits.watermark_blocks < limits.kv_blocks
    return (limits.watermark_blocks if line else limits.kv_blocks), line


def _lowered(evidence: Evidence) -> str:
    """What the live limit on blocks is, if it is well below what was allocated."""
    limits, ceilings = evidence.snapshot.limits, evidence.snapshot.ceilings or {}
    ceiling = ceilings.get("kv_blocks")
    if limits is None or not isinstance(ceiling, int) or limits.kv_blocks >= 0.9 * ceiling:
        return ""
    return f"kv_blocks is {limits.kv_blocks}, its ceiling {ceiling}"
