"""What inferd says about itself does not arrive, or is old."""

from runbooks.check import finding
from runbooks.disk_full import SINKS as DISK_SINKS
from runbooks.evidence import Evidence, lost
from telemetry.events import Finding

_STALE_SECONDS = 15.0  # as the alert InferdSnapshotStale


def check(evidence: Evidence) -> Finding | None:
    dropped = {sink: count for sink, count in lost(evidence).items() if sink not in DISK_SINKS and count}
    state = evidence.snapshot.state
    age_ns = state.report_age_ns if state is not None and evidence.serving else None
    stale = age_ns is not None and age_ns > _STALE_SECONDS * 1e9 and evidence.source != "offline"
    if not dropped and not stale:
        return None
    section = "the-engine-s-reports-are-old" if stale else "trace" if "trace" in dropped else "a-sink-is-behind"
    return finding(
        evidence,
        "telemetry_lost",
        "warning",
        f"the engine's last report is {age_ns / 1e9:.0f} s old"
        if stale and age_ns is not None
        else f"telemetry is lost ({', '.join(dropped)}); serving is not affected",
        confidence=0.9,
        next_step=f"inferd doctor runbook telemetry_lost {section}",
        section=section,
        lost=", ".join(f"{sink} {count} events" for sink, count in dropped.items()) or "nothing",
        last_report="not reported" if age_ns is None else f"{age_ns / 1e9:.1f} s ago",
    )
