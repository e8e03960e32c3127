"""The report: findings for people, for programs, and as an exit code.

Owns the words around findings and their JSON; the remedy is printed where it is one command, so that a tired person
need not open the runbook for it. It must not judge or gather. Enter at `text`, `as_json`, `exit_code`.
"""

import re
import textwrap
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from runbooks import check
from runbooks.evidence import Evidence
from telemetry.events import Finding

# Apart from inferd's codes for errors (1-7), so that a script can tell 'it is ill' from 'the doctor could not look'.
EXIT_CODES: Final = {"info": 0, "warning": 10, "critical": 20}
_WIDTH = 100


def exit_code(findings: Sequence[Finding]) -> int:
    """Of the worst finding; 0 if there is none that matters."""
    return max((EXIT_CODES[each.severity] for each in findings), default=0)


def text(evidence: Evidence, findings: Sequence[Finding]) -> str:
    """What a tired person reads: state in one line, then the findings, worst first, each with what to do."""
    lines = [_heading(evidence), ""]
    told: set[str] = set()
    for each in findings:
        cause = next((f.runbook for f in findings if f.runbook in told and each.runbook in f.explains), "")
        lines += [*_told(each, cause), ""]
        told.add(each.runbook)
    if not findings:
        lines += ["No findings: every check that had its evidence passed.", ""]
    if evidence.missing:
        lines += ["Not reported:", *(f"  {name}: {why}" for name, why in evidence.missing.items()), ""]
    return "\n".join(lines)


def as_json(evidence: Evidence, findings: Sequence[Finding]) -> dict[str, Any]:
    """The same for programs; findings are as in a snapshot."""
    return {
        "source": evidence.source,
        "unix_seconds": evidence.unix_seconds,
        "model": evidence.snapshot.model,
        "state": msgspec.to_builtins(evidence.snapshot.state),
        "findings": msgspec.to_builtins(list(findings)),
        "missing": dict(evidence.missing),
        "gather_seconds": round(evidence.gather_seconds, 4),
        "exit_code": exit_code(findings),
    }


def _heading(evidence: Evidence) -> str:
    state, queue, latency = evidence.snapshot.state, evidence.snapshot.queue, evidence.snapshot.latency
    parts = [evidence.snapshot.model]
    if evidence.source == "offline":
        life = evidence.life
        if life is None:
            return "no daemon answers, and no flight recorder was found"
        end = "lives" if life.alive else "ended in order" if life.clean else "died"
        parts += [f"daemon pid {life.pid} {end}, silent for {life.silent_seconds:.0f} s; this is its last minute"]
    elif state is not None:
        parts += [f"daemon {state.daemon or 'not reported'}", f"engine {state.engine or 'not reported'}"]
    if queue is not None:
        parts.append(f"{queue.running} running, {queue.waiting} waiting")
    if latency is not None:
        parts.append(f"{latency.output_tokens_per_second:.0f} tokens/s")
        if latency.ttft.p99 is not None:
            parts.append(f"first token p99 {latency.ttft.p99:.2f} s")
    return " · ".join(parts)


def _told(finding: Finding, cause: str) -> list[str]:
    after = f" (follows from {cause})" if cause else ""
    lines = [f"{finding.severity.upper()} {finding.runbook}: {finding.summary}{after}"]
    for name, value in finding.evidence.items():
        lines += textwrap.wrap(
            f"{name}: {value}", _WIDTH, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False
        )
    lines.append(f"  → {finding.next_step}")
    where = f"inferd doctor runbook {finding.runbook} {finding.section}".rstrip()
    if where not in finding.next_step:
        lines.append(f"    {where}")
    if remedy := _remedy(finding):
        lines.append(f"    remedy: {remedy}")
    lines.append(f"    confidence {finding.confidence:.0%}")
    return lines


def _remedy(finding: Finding) -> str:
    """The cheapest of the section that it leads to, if that is a command as it stands; else it is to be read there."""
    book = next((each for each in check.shelf() if each.name == finding.runbook), None)
    section = book.section(finding.section) if book and finding.section else None
    acts = (line for line in (section or "").splitlines() if line.startswith("inferd doctor do "))
    first = next(acts, "")
    return "" if re.search(r"\b[A-Z]+(_[A-Z]+)*\b", first) else first
