"""The engine, or the daemon itself, died without being asked to."""

from collections import Counter

from runbooks.check import finding
from runbooks.evidence import Evidence
from telemetry.events import EngineEnded, Finding

_RECENT_SECONDS = 900.0
_SILENT_SECONDS = 10.0  # without an event in the flight recorder: until then it is busy rather than stuck
_LOOP = 3
_LIVES = ("killed", "crash", "wedged")  # how a life may end that its successor explains; of memory oom tells
_FRESH_SECONDS = 120.0  # for so long one death explains what followed from it
_EXPLAINS = ("slow_start", "ttft_spike", "short_answers", "overload")
# Deaths that another runbook explains better.
_OTHERS = {"oom": "oom", "oom_killed": "oom", "wedged": "wedged_engine"}


def check(evidence: Evidence) -> Finding | None:
    return _daemon_died(evidence) or _engine_died(evidence) or _life_before(evidence)


def _daemon_died(evidence: Evidence) -> Finding | None:
    life, silent = evidence.life, evidence.missing.get("snapshot", "")
    if life is None or life.clean or (life.alive and not silent):
        return None
    section = "the-daemon-does-not-answer" if life.alive else "the-daemon-died"
    busy = life.alive and life.silent_seconds < _SILENT_SECONDS
    return finding(
        evidence,
        "crash_loop",
        "warning" if busy else "critical",
        f"the daemon (pid {life.pid}) lives, but did not answer on its control socket in time"
        if life.alive
        else f"the daemon (pid {life.pid}) died without an orderly end",
        confidence=0.5 if busy else 0.95,
        next_step=f"inferd doctor runbook crash_loop {section}",
        section=section,
        control_socket=silent or "not asked",
        flight_recorder=f"no mark of an orderly end; last event {life.silent_seconds:.0f} s ago",
        kernel=_kernel(evidence),
    )


def _engine_died(evidence: Evidence) -> Finding | None:
    deaths = [end for end in evidence.of(EngineEnded, _RECENT_SECONDS) if end.cause != "drained"]
    if not deaths:
        return None
    causes = Counter(end.cause for end in deaths)
    failed = evidence.snapshot.state is not None and evidence.snapshot.state.engine == "failed"
    loop = len(deaths) >= _LOOP or failed
    victims = sum(len(end.victims) for end in deaths)
    times = "once" if len(deaths) == 1 else f"{len(deaths)} times"
    return finding(
        evidence,
        "crash_loop",
        "critical" if loop else "warning" if len(deaths) > 1 else "info",
        f"the engine died {times} in 15 minutes" + (": a restart does not help" if loop else " and was restarted"),
        confidence=0.5 if set(causes) & set(_OTHERS) else 0.9,
        next_step=f"see what killed it: inferd doctor runbook crash_loop {_section(causes)}",
        section=_section(causes),
        explains=_EXPLAINS if len(deaths) > 1 or evidence.of(EngineEnded, _FRESH_SECONDS) else (),
        causes=", ".join(f"{cause} × {count}" for cause, count in causes.most_common()),
        last=deaths[-1].detail or deaths[-1].cause,
        requests_lost=str(victims),
        kernel=_kernel(evidence),
    )


def _life_before(evidence: Evidence) -> Finding | None:
    """This daemon is well, and has found that the one before it died; it wrote that one's post-mortem."""
    both = [
        each
        for each in evidence.incidents(*_LIVES, within_seconds=_RECENT_SECONDS)
        if each.end is not None and each.end.process in ("both", "daemon")
    ]
    if not both:
        return None
    return finding(
        evidence,
        "crash_loop",
        "warning" if len(both) > 1 else "info",
        f"the daemon died {'once' if len(both) == 1 else f'{len(both)} times'} in 15 minutes and was started again",
        confidence=0.9,
        next_step="inferd doctor runbook crash_loop the-daemon-died",
        section="the-daemon-died",
        explains=_EXPLAINS,
        causes=", ".join(each.cause for each in both),
        last=both[-1].summary,
        bundle=both[-1].bundle or "none",
        kernel=_kernel(evidence),
    )


def _section(causes: Counter[str]) -> str:
    cause = causes.most_common(1)[0][0]
    return {"killed": "killed-from-outside", "crash": "crashed"}.get(cause, "other-causes")


def _kernel(evidence: Evidence) -> str:
    kills = evidence.host.cgroup.oom_kills if evidence.host.cgroup else None
    return "OOM kills in this memory group: " + ("not reported" if kills is None else str(kills))
