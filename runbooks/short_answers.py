"""Answers get shorter while the queue grows: latency looks fine because answers are cut."""

from collections import Counter

from runbooks.check import finding
from runbooks.evidence import Evidence
from telemetry.events import Finding, RequestRecord

_LEAST = 16  # answers on either side
_RECENT = 0.25  # the newest quarter is compared with what came before
_SHORTER = 0.6  # as the alert InferdAnswersShorterUnderLoad
_LONGER_WAIT = 2.0
_CUT = ("deadline", "abort", "error")


def check(evidence: Evidence) -> Finding | None:
    answers = evidence.served()
    recent = max(_LEAST, int(len(answers) * _RECENT))
    before, now = answers[:-recent], answers[-recent:]
    if len(before) < _LEAST:
        return None
    was, tokens = _mean(before), _mean(now)
    if not was or tokens >= _SHORTER * was or _wait_s(now) < _LONGER_WAIT * _wait_s(before):
        return None
    ends = Counter(record.reason for record in now)
    cut = sum(ends[reason] for reason in _CUT)
    section = _section(ends, _asked(now) < _SHORTER * _asked(before))
    return finding(
        evidence,
        "short_answers",
        "warning",
        f"answers got shorter while requests wait longer: {tokens:.0f} tokens instead of {was:.0f}",
        confidence=0.85 if cut else 0.6,
        next_step=f"inferd doctor runbook short_answers {section}",
        section=section,
        explains=(),
        answers=f"{tokens:.1f} tokens (the newest {len(now)}), {was:.1f} before ({len(before)})",
        ends=", ".join(f"{reason} × {count}" for reason, count in ends.most_common()),
        wait=f"{_wait_s(now):.2f} s in the queue, {_wait_s(before):.2f} s before",
        asked_for=f"{_asked(now):.0f} tokens at most, {_asked(before):.0f} before",
    )


def _section(ends: Counter[str], asked_less: bool) -> str:
    if ends["deadline"] >= max(1, ends["abort"]):
        return "deadlines"
    if ends["abort"]:
        return "clients-give-up"
    return "clients-ask-for-less" if asked_less else "other-reasons"


def _mean(records: list[RequestRecord]) -> float:
    return sum(record.output_tokens for record in records) / len(records)


def _asked(records: list[RequestRecord]) -> float:
    return sum(record.max_tokens for record in records) / len(records)


def _wait_s(records: list[RequestRecord]) -> float:
    """Mean time in the queue; never 0, so that it can be compared."""
    waits = (record.stages.get("queue", 0) + record.stages.get("admission", 0) for record in records)
    return max(1e-4, sum(waits) / len(records) / 1e9)
