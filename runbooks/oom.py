"""Memory ran out, or is about to."""

from collections import Counter

from runbooks.check import finding
from runbooks.evidence import Evidence
from telemetry.events import Finding, Incident
from telemetry.ladder import IN_USE

_NEAR_RATIO = 0.02  # of the limit: as the alert InferdMemoryNearLimit
_SECTIONS = {
    "capacity": "too-small",
    "fragmentation": "fragmentation",
    "kv_exhausted": "the-kv-cache-took-it",
    "activation_spike": "one-step-was-too-large",
    "logits": "one-step-was-too-large",
    "neighbour": "neighbours",
    "host_cgroup": "the-group-s-limit",
    "oom_killed": "the-group-s-limit",
    "leak": "a-leak",
}


def check(evidence: Evidence) -> Finding | None:
    found = evidence.incidents("oom", "oom_killed")
    return _happened(evidence, found) if found else _near(evidence)


def _happened(evidence: Evidence, found: list[Incident]) -> Finding:
    causes = Counter(incident.cause or incident.kind for incident in found)
    cause = causes.most_common(1)[0][0]
    section = _SECTIONS.get(cause, "whose-bytes")
    times = "once" if len(found) == 1 else f"{len(found)} times"
    return finding(
        evidence,
        "oom",
        "critical" if len(found) > 1 or found[-1].kind == "oom_killed" else "warning",
        f"memory ran out {times} in half an hour: {cause.replace('_', ' ')}",
        confidence=0.6 if cause == "unknown" else 0.95,
        next_step=f"inferd doctor runbook oom {section}",
        section=section,
        explains=("crash_loop", "ttft_spike", "short_answers", "kv_pressure", "slow_start"),
        causes=", ".join(f"{name} × {count}" for name, count in causes.most_common()),
        last=found[-1].summary,
        bundle=found[-1].bundle or "none",
        whose_bytes=_owners(evidence),
    )


def _near(evidence: Evidence) -> Finding | None:
    memory = evidence.snapshot.memory
    if memory is None or not memory.limit_bytes or not memory.owners or memory.source != "ledger":
        return None
    headroom = memory.owners.get("headroom")
    if headroom is None or headroom >= _NEAR_RATIO * memory.limit_bytes:
        return None
    return finding(
        evidence,
        "oom",
        "warning",
        f"memory is nearly full: {headroom / memory.limit_bytes:.1%} of the limit is left",
        confidence=0.8,
        next_step="inferd doctor runbook oom whose-bytes",
        section="whose-bytes",
        limit=_mib(memory.limit_bytes),
        whose_bytes=_owners(evidence),
    )


def _owners(evidence: Evidence) -> str:
    memory = evidence.snapshot.memory
    if memory is None or not memory.owners:
        return "not reported"
    largest = sorted(((size, name) for name, size in memory.owners.items() if size > 0), reverse=True)[:5]
    used = sum(memory.owners.get(owner, 0) for owner in IN_USE)
    return f"{', '.join(f'{name} {_mib(size)}' for size, name in largest)}; in use {_mib(used)} ({memory.source})"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
