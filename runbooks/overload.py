"""More comes in than can be served: requests are turned away, or wait until their deadline."""

from collections import Counter

from runbooks.check import finding
from runbooks.evidence import WINDOW_SECONDS, Evidence
from telemetry.events import Finding, RequestRecord

_RATIO = 0.05  # as the alert InferdShedding
_LEAST = 3
_TURNED_AWAY = ("shed", "deadline")
_NOT_READY = "engine_not_ready"  # error of those that came before the engine did: no load, others tell why it was away
_LEAST_LAGS = 30


def check(evidence: Evidence) -> Finding | None:
    ended = [record for record in evidence.of(RequestRecord, WINDOW_SECONDS) if record.error != _NOT_READY]
    ends = Counter(record.reason for record in ended)
    away = sum(ends[reason] for reason in _TURNED_AWAY)
    lag_s = _lag_s(evidence)
    shedding = away >= _LEAST and away >= _RATIO * len(ended)
    if not shedding and lag_s < evidence.targets.loop_lag_seconds:
        return None
    section = "clients-or-capacity" if shedding else "the-api-loop-is-starving"
    queue = evidence.snapshot.queue
    return finding(
        evidence,
        "overload",
        "warning",
        f"{away} of the last {len(ended)} requests were turned away or missed their deadline"
        if shedding
        else f"the API's event loop wakes up {lag_s:.2f} s late",
        confidence=0.9,
        next_step=f"inferd doctor runbook overload {section}",
        section=section,
        explains=("short_answers", "ttft_spike"),
        ends=", ".join(f"{reason} × {count}" for reason, count in ends.most_common()) or "none in this minute",
        queue="not reported" if queue is None else f"{queue.running} running, {queue.waiting} waiting",
        limits=f"max_queued_requests {evidence.setting('max_queued_requests', 0):.0f}, "
        f"request_timeout {evidence.setting('request_timeout', 0):.0f} s (0: not reported)",
        api_loop=f"p90 {lag_s:.3f} s late",
    )


def _lag_s(evidence: Evidence) -> float:
    """Of one wake-up in ten: a start, or one hiccup, is no starving."""
    latency = evidence.snapshot.latency
    lag = (latency.loop_lag or {}).get("api") if latency else None
    return lag.p90 or 0.0 if lag and lag.count >= _LEAST_LAGS else 0.0
