"""The engine is there and does nothing: no progress, or requests that run and get no tokens."""

from runbooks.check import finding
from runbooks.evidence import Evidence, step_seconds
from telemetry.events import EngineEnded, Finding

_EXPLAINS = ("ttft_spike", "slow_decode", "overload", "telemetry_lost", "low_throughput", "short_answers")
_RECENT_SECONDS = 900.0
_TIMES_LONGEST = 2.0  # of the recent steps


def check(evidence: Evidence) -> Finding | None:
    return _stuck(evidence) or _without_tokens(evidence) or _was_stuck(evidence)


def _stuck(evidence: Evidence) -> Finding | None:
    """No step, no part of one, no idle tick, and for longer than its steps have taken lately: on a machine that is
    short of cores one may take ten seconds."""
    state = evidence.snapshot.state
    if state is None or not evidence.serving or state.progress_age_ns is None or evidence.source == "offline":
        return None
    age_s = state.progress_age_ns / 1e9
    longest_s = max((step_seconds(step) for step in evidence.steps), default=0.0)
    deadline_s = evidence.setting("progress_deadline", 60.0)
    usual_s = min(_TIMES_LONGEST * longest_s, deadline_s / 2)
    if age_s < max(evidence.targets.stuck_seconds, usual_s):
        return None
    stopped = evidence.host.engine_state in ("T", "t")
    queue = evidence.snapshot.queue
    return finding(
        evidence,
        "wedged_engine",
        "critical",
        f"the engine is stuck: no progress for {age_s:.0f} s" + (", its process is stopped" if stopped else ""),
        confidence=0.95,
        next_step="let the engine be restarted: inferd doctor runbook wedged_engine restart"
        if not stopped
        else f"somebody stopped process {state.engine_pid}: kill -CONT {state.engine_pid}",
        section="stopped" if stopped else "restart",
        explains=_EXPLAINS,
        last_progress=f"{age_s:.1f} s ago (the daemon's deadline is {deadline_s:.0f} s)",
        longest_step=f"{longest_s:.1f} s, of those in the last minute",
        engine=f"pid {state.engine_pid}, process state {evidence.host.engine_state or 'not reported'}",
        requests="not reported" if queue is None else f"{queue.running} running, {queue.waiting} waiting",
    )


def _without_tokens(evidence: Evidence) -> Finding | None:
    """It ticks, it says that it runs requests, and nothing was granted for some time."""
    queue, steps = evidence.snapshot.queue, evidence.snapshot.steps
    if queue is None or steps is None or not queue.running or not evidence.serving or evidence.source == "offline":
        return None
    silent_ns = evidence.snapshot.state.progress_age_ns if evidence.snapshot.state else None
    if silent_ns is None or silent_ns > 0.5e9 * evidence.targets.stuck_seconds:
        return None  # it does not tick either: it is stuck, or is about to be found so
    history = [sample for sample in evidence.history if sample.running]
    last_ns = max((step.at_ns for step in steps), default=history[0].at_ns if history else evidence.at_ns)
    idle_s = (evidence.at_ns - last_ns) / 1e9
    if idle_s < evidence.targets.stuck_seconds:
        return None
    return finding(
        evidence,
        "wedged_engine",
        "critical",
        f"{queue.running} requests are running, and no token was computed for {idle_s:.0f} s",
        confidence=0.9,
        next_step="look at what they wait for: inferd doctor runbook wedged_engine running-without-tokens",
        section="running-without-tokens",
        explains=_EXPLAINS,
        last_step=f"{idle_s:.1f} s ago",
        requests=f"{queue.running} running, {queue.waiting} waiting",
        engine=f"process state {evidence.host.engine_state or 'not reported'}",
    )


def _was_stuck(evidence: Evidence) -> Finding | None:
    """The daemon has already killed it for that."""
    recent = evidence.incidents("wedged", within_seconds=_RECENT_SECONDS)
    if not recent:
        return None
    ended = [each for each in evidence.of(EngineEnded, _RECENT_SECONDS) if each.cause == "wedged"]
    times = "once" if len(recent) == 1 else f"{len(recent)} times"
    return finding(
        evidence,
        "wedged_engine",
        "critical" if len(recent) > 1 else "warning",
        f"the engine was stuck {times} in 15 minutes, and {'was restarted' if ended else 'moves again by itself'}",
        confidence=0.9,
        next_step="read the bundle it left: inferd doctor runbook wedged_engine why-was-it-stuck",
        section="why-was-it-stuck",
        explains=("crash_loop", *_EXPLAINS),
        last=recent[-1].summary,
        bundle=recent[-1].bundle or "none",
    )
