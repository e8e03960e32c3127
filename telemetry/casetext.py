"""Case texts: a case file for somebody who is woken by it and has never seen the code.

Owns the words: a title that says the cause, what was seen with its figures, what it was not, what to do now; then the
tables. It must not judge (forensics.py), write (bundle.py) or leave out what the JSON has. Enter at `to_markdown`.
"""

import time
from collections.abc import Iterable
from typing import Final

import msgspec

from telemetry.casefile import Bundle, Rungs
from telemetry.evidence import Clue, Knob
from telemetry.forensics import IN_WORDS, mib

_STEPS_SHOWN: Final = 12
_TITLES: Final = {
    "capacity": "Memory ran out: there is too little for a normal step",
    "fragmentation": "Memory ran out: enough was free, but only in small pieces",
    "kv_exhausted": "Memory ran out: the KV cache had grown into the room that a step needs",
    "activation_spike": "Memory ran out: one request made one step too large",
    "logits": "Memory ran out: the logits of one step were too large",
    "neighbour": "Memory ran out: another process took it",
    "host_cgroup": "Memory ran out: the limit of the control group or of the machine was reached",
    "leak": "Memory ran out: the engine held more and more between steps",
    "unknown": "Memory ran out: the measurements do not say why",
    "wedged": "The engine was stuck: no progress within its deadline",
    "killed": "A process was killed from outside (SIGKILL)",
    "crash": "A process ended by itself, or by a fault of its own",
    "leak_suspected": "A leak is suspected: something grows while nobody asks for anything",
}
_RUNBOOKS: Final = {
    "oom": "oom",
    "oom_killed": "oom",
    "wedged": "wedged_engine",
    "killed": "crash_loop",
    "crash": "crash_loop",
    "leak_suspected": "memory_creep",
}
_CAUSES: Final = {
    "capacity": "too little memory for a normal step",
    "fragmentation": "memory in small pieces",
    "kv_exhausted": "the KV cache",
    "activation_spike": "one large request",
    "logits": "large logits",
    "neighbour": "another process",
    "host_cgroup": "the control group's or the machine's limit",
    "leak": "a leak",
    "oom_killed": "a kill by the kernel for memory",
    "leak_suspected": "a leak",
}
_PARTS: Final = {
    "suspect": "named by the fault",
    "victim": "cut off by it",
    "running": "ran beside it",
}
_SOURCES: Final = {"ledger": "as measured", "plan": "as planned at start: nothing was measured yet"}


def to_markdown(bundle: Bundle) -> str:
    """The bundle for people: what it was, what was seen, what to do; then the tables."""
    lines = [f"# {_TITLES.get(bundle.cause, f'{bundle.kind}: {bundle.cause}')}", "", *_paragraph(bundle)]
    lines += _evidence_lines(bundle) + _advice_lines(bundle)
    lines += _memory_lines(bundle) + _request_lines(bundle) + _step_lines(bundle) + _state_lines(bundle)
    for name, text in bundle.stacks.items():
        lines += ["", f"## Stacks of the {name}", "", "```", text.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _paragraph(bundle: Bundle) -> list[str]:
    """When, where, what, and what came of it."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(bundle.unix_seconds))
    where = f", model {bundle.model}" if bundle.model else ""
    lines = [f"{when}{where}. {_sentence(bundle.summary)}", ""]
    if bundle.previous_life:
        lines += ["It was found by the next start, in the flight recorder of the life that ended.", ""]
    lines += [f"**What came of it:** {_sentence(bundle.outcome or 'not known when this was written.')}", ""]
    ids = f"incident `{bundle.incident_id}` (kind {bundle.kind}, cause {bundle.cause})"
    return [*lines, f"{ids}, engine `{bundle.engine_id or 'unknown'}`"]


def _evidence_lines(bundle: Bundle) -> list[str]:
    lines: list[str] = []
    for speaks, title in (
        ("for", "Why this is the cause"),
        ("against", "What it was not"),
        ("unknown", "What could not be found out"),
    ):
        clues = [clue for clue in bundle.clues if clue.speaks == speaks]
        notes = bundle.notes if speaks == "unknown" else ()
        if clues or notes:
            lines += ["", f"## {title}", ""]
            lines += [_clue(clue, bundle.cause) for clue in clues] + [f"- {_sentence(note)}" for note in notes]
    return lines


def _clue(clue: Clue, cause: str) -> str:
    """One line; which cause it is about, unless it is the one found."""
    text = clue.text.removeprefix("not measured: ")
    about = "" if clue.cause == cause else f"{_capital(_CAUSES.get(clue.cause, clue.cause))}: "
    return f"- {about}{text.rstrip('.')}." if about else f"- {_sentence(text)}"


def _advice_lines(bundle: Bundle) -> list[str]:
    lines = ["", "## What to do", ""]
    lines += [_knob(knob, bundle) for knob in bundle.knobs] or ["- Nothing that is known would have prevented it."]
    runbook = _RUNBOOKS.get(bundle.kind)
    if runbook:
        lines += [f"- The steps, one by one: `inferd doctor runbook {runbook}`"]
    return lines


def _knob(knob: Knob, bundle: Bundle) -> str:
    """The setting, what to do with it, what it is now, and the command that halves it, if it can be set live."""
    name = knob.name.removeprefix("--").replace("-", "_")
    limits = msgspec.structs.asdict(bundle.limits) if bundle.limits is not None else {}
    now = limits.get(name, bundle.resolved.get(name))
    text = f"- `{knob.name}`: {knob.advice}"
    if not isinstance(now, int):
        return text
    text += f". It is {now} now"
    if name in limits and "lower" in knob.advice and now > 1:
        text += f"; to halve it at once: `inferd doctor do set {name}={now // 2}`"
    return text


def _memory_lines(bundle: Bundle) -> list[str]:
    lines = []
    fault = bundle.memory
    if fault is not None:
        at = fault.at
        phase = IN_WORDS.get(fault.step.phase, fault.step.phase or "an unknown phase")
        asked = mib(fault.requested_bytes) if fault.requested_bytes else "an amount that the allocator did not say"
        lines += ["", "## Memory when it failed", ""]
        lines += [f"- Asked for: {asked}, in {phase}."]
        lines += [f"- Free: {mib(at.free_bytes)} below a limit of {mib(at.limit_bytes)} ({_scope(at.scope)})."]
        lines += [_held("Held by the allocator, unused", at.allocator_free_bytes, at.largest_free_bytes)]
        lines += [f"- In KV blocks that are in use: {mib(at.kv_bytes)}."]
        lines += [f"- Used by others under the same limit: {mib(at.neighbour_bytes)}."]
    before, now = bundle.ladder_before, bundle.ladder_at
    if before is not None or now is not None:
        lines += ["", f"## Who had which memory ({_SOURCES.get((now or before or _NOBODY).source, '')})", ""]
        lines += ["| owner | before | at the fault |", "|---|---|---|"]
        for owner in _owners(before, now):
            cells = (mib(rungs.owners.get(owner)) if rungs else "-" for rungs in (before, now))
            lines += [f"| {owner} | {' | '.join(cells)} |"]
    return lines


_NOBODY: Final = Rungs(at_ns=0, device="", source="", owners={})


def _scope(scope: str) -> str:
    return IN_WORDS.get(scope, scope) or "whose limit is unknown"


def _held(what: str, free: int | None, largest: int | None) -> str:
    return f"- {what}: {mib(free)}" + (f", the largest piece {mib(largest)}." if largest is not None else ".")


def _owners(before: Rungs | None, now: Rungs | None) -> list[str]:
    """Largest first, without those that have nothing."""
    owners = {**(before.owners if before else {}), **(now.owners if now else {})}
    most = {name: max(abs(r.owners.get(name, 0)) for r in (before, now) if r) for name in owners}
    return sorted((name for name in owners if most[name]), key=lambda name: -most[name])


def _request_lines(bundle: Bundle) -> list[str]:
    if not bundle.requests:
        return []
    lines = [
        "",
        "## Requests",
        "",
        "| request | part | prompt tokens | output tokens | ended |",
        "|---|---|---|---|---|",
    ]
    for each in bundle.requests:
        ended = f"{each.reason} {each.error}".strip() or "-"
        counts = f"{_count(each.prompt_tokens)} | {_count(each.output_tokens)}"
        lines += [f"| {each.request_id} | {_PARTS.get(each.part, each.part)} | {counts} | {ended} |"]
    return lines


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)


def _step_lines(bundle: Bundle) -> list[str]:
    if not bundle.steps:
        return []
    lines = ["", f"## The last steps that went well ({len(bundle.steps)} in the JSON)", ""]
    lines += [
        "| step | prefill tokens | decode tokens | running | waiting | KV blocks active/free | ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for step in bundle.steps[-_STEPS_SHOWN:]:
        spent_ms = (step.plan_ns + step.launch_ns + step.collect_ns + step.commit_ns) / 1e6
        lines += [
            f"| {step.step} | {step.prefill_tokens} | {step.decode_tokens} | {step.running} | {step.waiting} "
            f"| {step.kv_active}/{step.kv_free} | {spent_ms:.1f} |"
        ]
    return lines


def _state_lines(bundle: Bundle) -> list[str]:
    lines = []
    if bundle.limits is not None:
        lines += ["", "## Limits at the time", "", _pairs(msgspec.structs.asdict(bundle.limits).items())]
    if bundle.decisions:
        lines += ["", "## The tuner's last decisions", ""]
        lines += [f"- {each.rule}: {each.knob} {each.before} → {each.after}" for each in bundle.decisions]
    if bundle.end is not None and bundle.end.last_lines:
        lines += ["", f"## Last words of the {bundle.end.process}", "", "```", *bundle.end.last_lines, "```"]
    if bundle.versions:
        lines += ["", "## Versions", "", _pairs(bundle.versions.items())]
    return lines


def _pairs(pairs: Iterable[tuple[str, object]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in pairs)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sentence(text: str) -> str:
    return _capital(text.replace("\n", " ").rstrip(".")) + "."
