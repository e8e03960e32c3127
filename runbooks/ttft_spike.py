"""First tokens are late. Three causes with three remedies: the queue, others' prefill, one's own uncached prompt."""

from runbooks.check import finding
from runbooks.evidence import WINDOW_SECONDS, Evidence
from telemetry.events import Finding, RequestRecord

_LEAST = 5  # first tokens in the minute
_BEFORE = ("admission", "tokenize", "wire_in", "queue")


def check(evidence: Evidence) -> Finding | None:
    latency = evidence.snapshot.latency
    if latency is None or latency.ttft.p99 is None or latency.ttft.count < _LEAST:
        return None
    target_s, p99_s = evidence.targets.ttft_seconds, latency.ttft.p99
    if p99_s <= target_s:
        return None
    slow = [record for record in evidence.served(2 * WINDOW_SECONDS) if _ttft_s(record) > target_s]
    section, why = _where(evidence, slow)
    spent = {stage: sum(r.stages.get(stage, 0) for r in slow) / 1e9 for stage in (*_BEFORE, "prefill", "prefill_wait")}
    prompts = sum(r.prompt_tokens for r in slow)
    cached = sum(r.cached_tokens for r in slow)
    return finding(
        evidence,
        "ttft_spike",
        "warning",
        f"first tokens are late (p99 {p99_s:.1f} s): {why}",
        confidence=0.7 if slow else 0.4,
        next_step=f"inferd doctor runbook ttft_spike {section}",
        section=section,
        time_to_first_token=f"p50 {latency.ttft.p50:.2f} s, p99 {p99_s:.2f} s of {latency.ttft.count}",
        where_the_late_ones_spent_it=", ".join(f"{k} {v:.1f} s" for k, v in spent.items() if v > 0.05)
        or "not reported: none of them has ended yet",
        prompts="not reported"
        if not slow
        else f"{prompts // len(slow)} tokens each, {cached / max(1, prompts):.0%} cached",
        prefill_rows_a_step=f"{_prefill_rows(evidence):.1f}",
    )


def _where(evidence: Evidence, slow: list[RequestRecord]) -> tuple[str, str]:
    """The section and the words for the stage that takes most of the late requests' time."""
    queued = sum(r.stages.get(stage, 0) for r in slow for stage in _BEFORE)
    prefill = sum(r.stages.get("prefill", 0) for r in slow)
    waited = sum(r.stages.get("prefill_wait", 0) for r in slow)
    if queued >= prefill + waited:
        steps = evidence.steps
        budget = sum(step.waiting_budget for step in steps)
        if budget > sum(step.waiting_capacity + step.waiting_kv for step in steps):
            return "others-prefill", "the prefill of others takes up the steps"
        return "queue", "requests wait in the queue"
    if waited > prefill or _prefill_rows(evidence) > 2:
        return "others-prefill", "they share steps with the prefill of others"
    prompts, cached = sum(r.prompt_tokens for r in slow), sum(r.cached_tokens for r in slow)
    kv = evidence.snapshot.kv
    if kv is not None and kv.hit_tokens and cached < 0.2 * prompts:
        return "missed-prefix-cache", "their prompts missed the prefix cache, which others hit"
    return "long-prompts", "their prompts are long, and computed in full"


def _prefill_rows(evidence: Evidence) -> float:
    rows = [step.prefill_rows / max(1, step.merged) for step in evidence.steps if step.prefill_rows]
    return sum(rows) / len(rows) if rows else 0.0


def _ttft_s(record: RequestRecord) -> float:
    return (record.first_token_ns - record.arrival_ns) / 1e9 if record.first_token_ns else 0.0
