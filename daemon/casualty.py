"""What an engine's end means: the incident of a death that nobody asked for.

Owns which deaths are incidents. It must not know sessions, streams or files. Enter at `of`.
"""

from daemon.engine_life import Death
from telemetry.events import INCIDENT_CAUSES, Incident
from telemetry.evidence import ProcessEnd
from telemetry.forensics import judge_end

_REFUSALS = (2, 3, 4)  # exit codes of a start that was refused and explained: settings, model, memory plan
_LINES = 20
_LINE_LENGTH = 300


def of(death: Death, engine_id: str, *, served: bool, victims: tuple[str, ...], at_ns: int) -> Incident | None:
    """None for an orderly end, a refused start, and for what was already reported while it happened: a wedge by the
    watchdog, an out-of-memory by the engine that served, unless it only just said so with its last words."""
    told = death.cause == "wedged" or (death.cause == "oom" and served and not death.lacked_memory)
    if death.cause not in INCIDENT_CAUSES or told or (not served and death.exit_code in _REFUSALS):
        return None
    end = ProcessEnd(
        process="engine",
        exit_code=death.exit_code,
        oom_kills=death.oom_kills,
        killed_here=death.killed_here,
        lacked_memory=death.lacked_memory,
        phase=death.phase,
        last_lines=tuple(line[:_LINE_LENGTH] for line in death.last_lines[-_LINES:]),
    )
    verdict = judge_end(end)
    short = "unknown" if death.lacked_memory else "capacity"
    cause = {"oom": short, "oom_killed": "host_cgroup"}.get(death.cause, death.cause)
    return Incident(
        at_ns=at_ns,
        incident_id=f"{death.cause}-{at_ns}",
        kind=death.cause,
        cause=cause,
        summary=f"{verdict.summary}: {death.detail}",
        engine_id=engine_id,
        request_ids=victims,
        clues=verdict.clues,
        knobs=verdict.knobs,
        end=end,
    )
