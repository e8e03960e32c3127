"""The prefix cache finds nothing, and that is not because prompts have nothing in common."""

from runbooks.check import finding
from runbooks.evidence import Evidence
from telemetry.events import Finding

_LEAST_TOKENS = 500  # looked up
_USELESS_RATIO = 0.01
_SHARED_RATIO = 0.05  # of the looked-up tokens agreed with a block that was longer than the agreement
_LEAST_REPEATS = 5


def check(evidence: Evidence) -> Finding | None:
    kv = evidence.snapshot.kv
    if kv is None or kv.hit_tokens is None or kv.miss_tokens is None:
        return None
    short = kv.too_short_tokens or 0
    asked = kv.hit_tokens + kv.miss_tokens + short
    if asked < _LEAST_TOKENS or kv.hit_tokens >= _USELESS_RATIO * asked:
        return None
    off = (evidence.settings or {}).get("prefix_cache", {}).get("value") is False
    if off or short < _SHARED_RATIO * asked:
        return None  # prompts that share nothing are no fault, and neither is a cache that was switched off
    return finding(
        evidence,
        "prefix_cache",
        "info",
        f"prompts share a beginning, but it is shorter than a block of {kv.block_size or '?'} tokens, so it never hits",
        confidence=0.9,
        next_step="inferd doctor runbook prefix_cache shorter-than-a-block",
        section="shorter-than-a-block",
        hits=f"{kv.hit_tokens / asked:.1%} of {asked} tokens looked up",
        too_short=f"{short} tokens agreed with a block's beginning, but not with all of it",
        block=f"{kv.block_size or 'not reported'} tokens",
    )
