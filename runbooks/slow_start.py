"""It starts, and starts, and is not ready."""

from runbooks.check import finding
from runbooks.evidence import Evidence
from telemetry.events import EngineStarted, Finding
from telemetry.parts import StateView

_TIMES_AS_LONG = 4.0  # as its earlier starts
_LEAST_SECONDS = 20.0
_STARTING = ("starting", "degraded")


def check(evidence: Evidence) -> Finding | None:
    state = evidence.snapshot.state
    if state is None or state.daemon not in _STARTING or state.daemon_age_ns is None or evidence.source == "offline":
        return None
    if state.engine not in ("starting", "restarting", "loading", None):
        return None
    age_s = state.daemon_age_ns / 1e9
    earlier = [each.phases.get("total", sum(each.phases.values())) / 1e9 for each in evidence.of(EngineStarted)]
    usual_s = min(earlier, default=None)
    patience_s = evidence.targets.start_seconds
    if usual_s is not None:
        patience_s = min(patience_s, max(_LEAST_SECONDS, _TIMES_AS_LONG * usual_s))
    if age_s < patience_s:
        return None
    section = _section(evidence)
    return finding(
        evidence,
        "slow_start",
        "warning",
        f"not ready after {age_s:.0f} s ({state.daemon}): {_doing(evidence, state)}",
        confidence=0.85 if usual_s is not None or section != "loading" else 0.6,
        next_step=f"inferd doctor runbook slow_start {section}",
        section=section,
        explains=("overload",),
        engine=state.engine_why or state.engine or "not reported",
        process=f"state {evidence.host.engine_state or 'not reported'}",
        earlier_starts="none in this half hour" if usual_s is None else f"{usual_s:.1f} s",
        restarts=str(state.restarts or 0),
    )


def _section(evidence: Evidence) -> str:
    if evidence.host.engine_state in ("T", "t"):
        return "stopped"
    return "the-disk" if evidence.host.engine_state == "D" else "loading"


def _doing(evidence: Evidence, state: StateView) -> str:
    stopped = {"T": "its engine process is stopped", "D": "its engine process waits for the disk"}
    return stopped.get((evidence.host.engine_state or "").upper()) or state.engine_why or "the engine is loading"
