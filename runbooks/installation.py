"""What is wrong with the machine or the set-up before anything is served."""

from runbooks.check import finding
from runbooks.evidence import Evidence
from telemetry.events import SEVERITIES, Finding


def check(evidence: Evidence) -> Finding | None:
    troubles = evidence.installation
    if not troubles:
        return None
    worst = max(troubles, key=lambda trouble: SEVERITIES.index(trouble.severity))
    return finding(
        evidence,
        "installation",
        worst.severity,
        f"{worst.what}: {worst.found}" + (f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else ""),
        confidence=0.9,
        next_step=worst.do,
        section=worst.what.replace(" ", "-"),
        **{trouble.what: f"{trouble.found}; {trouble.do}" for trouble in troubles},
    )
