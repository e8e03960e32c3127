"""Streams stutter: the gap between two tokens is long. Others' prefill, a machine that is not ours alone, the host's
own work, or simply a batch that is too large for the bandwidth."""

from statistics import median

from runbooks.check import finding
from runbooks.evidence import Evidence, step_seconds
from telemetry.events import Finding, StepReport

_LEAST = 20  # gaps in the minute
_HOST_RATIO = 0.3  # of the steps' time that is not the device's
_OUTLIER = 5.0  # times the median


def check(evidence: Evidence) -> Finding | None:
    latency = evidence.snapshot.latency
    if latency is None or latency.inter_token.p99 is None or latency.inter_token.count < _LEAST:
        return None
    p99_s = latency.inter_token.p99
    if p99_s <= evidence.targets.inter_token_seconds:
        return None
    steps = evidence.steps
    section, why, confidence = _where(evidence, steps)
    seconds = sorted(step_seconds(step) for step in steps)
    return finding(
        evidence,
        "slow_decode",
        "warning",
        f"streams stutter (p99 of the gap between tokens is {p99_s:.2f} s): {why}",
        confidence=confidence,
        next_step=f"inferd doctor runbook slow_decode {section}",
        section=section,
        gap_between_tokens=f"p50 {latency.inter_token.p50:.3f} s, p99 {p99_s:.3f} s of {latency.inter_token.count}",
        steps=f"median {median(seconds):.3f} s, longest {seconds[-1]:.3f} s of {len(seconds)}"
        if seconds
        else "not reported",
        rows_a_step=f"{sum(s.decode_rows for s in steps) / sum(s.merged for s in steps):.1f} decoding"
        if steps
        else "not reported",
        machine=_machine(evidence),
    )


def _where(evidence: Evidence, steps: list[StepReport]) -> tuple[str, str, float]:
    mixed = [step_seconds(step) for step in steps if step.prefill_tokens and step.decode_rows]
    pure = [step_seconds(step) for step in steps if not step.prefill_tokens and step.decode_rows]
    if mixed and pure and median(mixed) > 2 * median(pure) and sum(mixed) > 0.3 * (sum(mixed) + sum(pure)):
        return "others-prefill", "the prefill of others shares their steps", 0.8
    if _noisy(pure or mixed):
        return "the-machine", "equal steps take very different times, so the machine is not ours alone", 0.75
    busy = sum(step_seconds(step) * step.merged for step in steps)
    host = sum(step.plan_ns + step.commit_ns + step.publish_ns for step in steps) / 1e9
    if busy and host > _HOST_RATIO * busy:
        return "the-host", f"{host / busy:.0%} of the steps is the scheduler's and telemetry's", 0.7
    return "bandwidth", "each step is slow, and alike", 0.5


def _noisy(seconds: list[float]) -> bool:
    """Some step took far longer than most, and such steps make up much of the time."""
    if len(seconds) < 5:
        return False
    usual = median(seconds)
    outliers = [each for each in seconds if each > _OUTLIER * usual]
    return bool(outliers) and sum(outliers) > 0.3 * sum(seconds)


def _machine(evidence: Evidence) -> str:
    host = evidence.host
    load = "not reported" if host.load_1m is None else f"{host.load_1m:.1f}"
    return f"load {load} on {host.cores or 'an unknown number of'} cores, {host.engine_threads or '?'} engine threads"
