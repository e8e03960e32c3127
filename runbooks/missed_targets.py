"""A target of latency that was asked for is missed, and the tuner has said why."""

from runbooks.check import finding
from runbooks.evidence import Evidence
from telemetry.events import Finding


def check(evidence: Evidence) -> Finding | None:
    missed = evidence.snapshot.missed_targets
    if not missed:
        return None
    names = {"ttft_s": "time to first token", "inter_token_s": "the gap between tokens"}
    which = " and ".join(names.get(name, name) for name in missed)
    first = next(iter(missed.values()))
    section = "more-arrives-than-is-served" if "more arrives" in first else "the-machine-is-too-slow"
    return finding(
        evidence,
        "missed_targets",
        "warning",
        f"the target of {which} is missed: {first}",
        confidence=0.8,
        next_step=f"inferd doctor runbook missed_targets {section}",
        section=section,
        **missed,
    )
