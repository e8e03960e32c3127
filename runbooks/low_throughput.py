"""Requests wait although there is room: a live limit is low, or the engine idles between steps."""

from typing import Final

from runbooks.check import finding
from runbooks.evidence import Evidence
from telemetry.events import Finding, LimitsView, StepReport

_WAITING_SHARE = 0.5  # of the reports with somebody in the queue
_BUSY_RATIO = 0.5  # as the alert InferdLowThroughput
_LEAST_STEPS = 10
# A limit, the ceiling's name among what was resolved, and the reason that requests then wait for.
_LIMITS: Final = (
    ("max_num_seqs", "rows", "waiting_capacity"),
    ("max_num_batched_tokens", "step_tokens", "waiting_budget"),
)


def check(evidence: Evidence) -> Finding | None:
    steps = evidence.steps
    if len(steps) < _LEAST_STEPS:
        return None
    waiting = sum(step.waiting > 0 for step in steps) / len(steps)
    if waiting < _WAITING_SHARE:
        return None
    lowered = _lowered(evidence, steps)
    busy = _busy(steps)
    if not lowered and busy >= _BUSY_RATIO:
        return None
    section = "a-limit-is-low" if lowered else "the-engine-idles"
    rows = sum(step.decode_rows + step.prefill_rows for step in steps) / sum(step.merged for step in steps)
    return finding(
        evidence,
        "low_throughput",
        "warning",
        f"requests wait although there is room: {lowered}"
        if lowered
        else f"requests wait while the engine computes only {busy:.0%} of the time",
        confidence=0.9 if lowered else 0.7,
        next_step=f"inferd doctor runbook low_throughput {section}",
        section=section,
        explains=("ttft_spike", "overload"),
        limits=lowered or "none is far below its ceiling",
        batch=f"{rows:.1f} rows a step; {steps[-1].waiting} waiting, in {waiting:.0%} of the reports",
        busy=f"{busy:.0%} of the time is steps",
    )


def _lowered(evidence: Evidence, steps: list[StepReport]) -> str:
    """The limits that hold requests back and are at most half of what was allocated."""
    limits, ceilings = evidence.snapshot.limits, evidence.snapshot.ceilings or {}
    if limits is None:
        return ""
    return ", ".join(
        f"{name} is {_value(limits, name)}, its ceiling {ceilings[ceiling]}"
        for name, ceiling, reason in _LIMITS
        if isinstance(ceilings.get(ceiling), int)
        and _value(limits, name) <= ceilings[ceiling] / 2
        and sum(getattr(step, reason) > 0 for step in steps) >= _WAITING_SHARE * len(steps)
    )


def _value(limits: LimitsView, name: str) -> int:
    return int(getattr(limits, name))


def _busy(steps: list[StepReport]) -> float:
    """Share of the time between the first and the last report that was spent in steps."""
    span_ns = steps[-1].at_ns - steps[0].at_ns
    spent = sum(s.plan_ns + s.launch_ns + s.collect_ns + s.commit_ns + s.publish_ns for s in steps[:-1])
    return min(1.0, spent / span_ns) if span_ns else 1.0
