"""Bundles: one fault as one JSON file and the same for people as Markdown, on disk before anybody asks.

Owns the format (`Bundle`, the same from version to version: fields are added, never renamed), and the folder: written
whole or not at all, each capped, the oldest removed first. It must not judge (forensics.py) or know what a fault is.
Enter at `Folder.write`; `Folder.read` gives one back, `to_markdown` renders it.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from telemetry.events import Decision, LimitsView, StepReport
from telemetry.evidence import Clue, Knob, MemoryFault, ProcessEnd
from telemetry.forensics import mib

FORMAT: Final = 1
FOLDER: Final = "incidents"  # in the state directory
MOST_BYTES: Final = 512 << 10  # of one bundle's JSON
KEPT: Final = 32
_ID: Final = re.compile(r"[a-z_]+-[0-9a-f-]{1,48}")
_STEPS_SHOWN: Final = 12


class Rungs(msgspec.Struct, frozen=True, kw_only=True):
    """The memory ladder at one moment: bytes by owner; they sum to the limit, if there is one."""

    at_ns: int
    device: str
    source: str  # ledger | plan
    owners: dict[str, int]
    limit_bytes: int | None = None


class Involved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that the fault touched. `part`: suspect (the fault names it), victim (it was cut off) or running."""

    request_id: str
    part: str
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    reason: str = ""  # how it ended, if it did
    error: str = ""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one fault. Times are monotonic ns of the host that wrote it, but `unix_seconds`."""

    format: int = FORMAT
    incident_id: str
    kind: str  # events.INCIDENT_CAUSES
    cause: str  # an OOM cause or the kind
    summary: str
    at_ns: int
    unix_seconds: float
    outcome: str = ""  # what came of it, as far as is known
    engine_id: str = ""
    model: str = ""
    previous_life: bool = False  # written by the next life, from the rings
    clues: tuple[Clue, ...] = ()
    knobs: tuple[Knob, ...] = ()
    requests: tuple[Involved, ...] = ()
    memory: MemoryFault | None = None
    end: ProcessEnd | None = None
    ladder_before: Rungs | None = None
    ladder_at: Rungs | None = None
    steps: tuple[StepReport, ...] = ()  # oldest first
    limits: LimitsView | None = None
    resolved: dict[str, Any] = {}
    decisions: tuple[Decision, ...] = ()
    stacks: dict[str, str] = {}
    versions: dict[str, str] = {}
    notes: tuple[str, ...] = ()  # what could not be found out, and what was left out for its size


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Bundle)


@dataclass(frozen=True, slots=True)
class Folder:
    """The bundles of one state directory."""

    path: Path
    kept: int = KEPT
    most_bytes: int = MOST_BYTES

    def write(self, bundle: Bundle) -> Path:
        """Both files, in place of older ones of the same id; then remove the oldest. Raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        bundle = fitted(bundle, self.most_bytes)
        target = self.file(bundle.incident_id)
        _replace(target.with_suffix(".md"), to_markdown(bundle).encode())
        _replace(target, msgspec.json.format(_encoder.encode(bundle), indent=1))
        self._rotate()
        return target

    def read(self, incident_id: str) -> Bundle | None:
        """None if it is not kept or cannot be read."""
        if not _ID.fullmatch(incident_id):
            return None
        try:
            return _decoder.decode(self.file(incident_id).read_bytes())
        except (OSError, msgspec.DecodeError):
            return None

    def file(self, incident_id: str) -> Path:
        """Where the JSON of that incident is or would be."""
        if not _ID.fullmatch(incident_id):
            raise ValueError(f"{incident_id!r} is no incident's id")
        return self.path / f"{incident_id}.json"

    def ids(self) -> list[str]:
        """Newest first."""
        found = []
        for file in self.path.glob("*.json"):
            try:
                found.append((file.stat().st_mtime_ns, file.stem))
            except FileNotFoundError:  # rotated away meanwhile
                continue
        return [name for _, name in sorted(found, reverse=True)]

    def _rotate(self) -> None:
        for name in self.ids()[self.kept :]:
            for suffix in (".json", ".md"):
                (self.path / f"{name}{suffix}").unlink(missing_ok=True)


def _replace(target: Path, data: bytes) -> None:
    """Whole or not at all, and on the disk when this returns."""
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(target)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def fitted(bundle: Bundle, most_bytes: int) -> Bundle:
    """`bundle`, or as much of it as fits: first steps go, then requests, then stacks; `notes` says so."""
    while len(_encoder.encode(bundle)) > most_bytes // 2:  # indentation takes up to as much again
        if len(bundle.steps) > 4:
            changes: dict[str, Any] = {"steps": bundle.steps[len(bundle.steps) // 2 :]}
        elif len(bundle.requests) > 8:
            changes = {"requests": bundle.requests[: len(bundle.requests) // 2]}
        elif bundle.stacks and max(map(len, bundle.stacks.values())) > 2048:
            changes = {"stacks": {name: text[: len(text) // 2] for name, text in bundle.stacks.items()}}
        else:
            changes = {"steps": (), "decisions": (), "resolved": {}, "stacks": {}, "requests": bundle.requests[:8]}
            return msgspec.structs.replace(bundle, notes=(*bundle.notes[:8], _CUT), **changes)
        bundle = msgspec.structs.replace(bundle, **changes)
        if _CUT not in bundle.notes:
            bundle = msgspec.structs.replace(bundle, notes=(*bundle.notes, _CUT))
    return bundle


_CUT: Final = "some of it was left out, so that the file keeps to its size"


def to_markdown(bundle: Bundle) -> str:
    """The bundle for people: the cause first, then why, then what to turn, then the facts."""
    lines = [f"# {bundle.kind}: {bundle.cause}", "", bundle.summary, ""]
    lines += [f"Outcome: {bundle.outcome}", ""] if bundle.outcome else []
    lines += [f"- incident `{bundle.incident_id}`, engine `{bundle.engine_id or 'unknown'}`, model `{bundle.model}`"]
    lines += ["- written by the next life, from the flight recorder"] if bundle.previous_life else []
    lines += ["", "## Evidence", "", "| cause | speaks | what was seen |", "|---|---|---|"]
    lines += [f"| {clue.cause} | {clue.speaks} | {_cell(clue.text)} |" for clue in bundle.clues]
    lines += ["", "## What would have prevented it", ""]
    lines += [f"- `{knob.name}`: {knob.advice}" for knob in bundle.knobs] or ["- nothing that is known"]
    lines += _memory_lines(bundle) + _request_lines(bundle) + _step_lines(bundle) + _state_lines(bundle)
    for name, text in bundle.stacks.items():
        lines += ["", f"## Stacks of the {name}", "", "```", text.rstrip(), "```"]
    lines += ["", "## Notes", "", *(f"- {note}" for note in bundle.notes)] if bundle.notes else []
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _memory_lines(bundle: Bundle) -> list[str]:
    lines = []
    fault = bundle.memory
    if fault is not None:
        at = fault.at
        lines += ["", "## Memory at the fault", ""]
        lines += [f"- asked for: {mib(fault.requested_bytes)} in {fault.step.phase or 'an unknown phase'}"]
        lines += [f"- limit: {mib(at.limit_bytes)} ({at.scope or 'unknown'}), free below it: {mib(at.free_bytes)}"]
        lines += [f"- allocator: {mib(at.allocator_free_bytes)} unused, largest piece {mib(at.largest_free_bytes)}"]
        lines += [f"- KV blocks in use: {mib(at.kv_bytes)}, neighbours: {mib(at.neighbour_bytes)}"]
    before, now = bundle.ladder_before, bundle.ladder_at
    if before is not None or now is not None:
        owners = {**(before.owners if before else {}), **(now.owners if now else {})}
        lines += ["", "## Ladder", "", "| owner | before | at the fault |", "|---|---|---|"]
        for owner in owners:
            cells = (mib(rungs.owners.get(owner)) if rungs else "-" for rungs in (before, now))
            lines += [f"| {owner} | {' | '.join(cells)} |"]
    return lines


def _request_lines(bundle: Bundle) -> list[str]:
    if not bundle.requests:
        return []
    lines = ["", "## Requests", "", "| request | part | prompt | output | ended |", "|---|---|---|---|---|"]
    for each in bundle.requests:
        ended = f"{each.reason} {each.error}".strip() or "-"
        counts = f"{_count(each.prompt_tokens)} | {_count(each.output_tokens)}"
        lines += [f"| {each.request_id} | {each.part} | {counts} | {ended} |"]
    return lines


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)


def _step_lines(bundle: Bundle) -> list[str]:
    if not bundle.steps:
        return []
    lines = ["", f"## Last steps ({len(bundle.steps)} in the JSON)", ""]
    lines += ["| step | prefill | decode | running | waiting | KV active/free | ms |", "|---|---|---|---|---|---|---|"]
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
        limits = msgspec.structs.asdict(bundle.limits)
        lines += ["", "## Limits", "", ", ".join(f"{name} {value}" for name, value in limits.items())]
    if bundle.decisions:
        lines += ["", "## Last decisions", ""]
        lines += [f"- {each.rule}: {each.knob} {each.before} → {each.after}" for each in bundle.decisions]
    if bundle.end is not None:
        end = bundle.end
        lines += ["", "## End", "", f"- {end.process}: exit code {end.exit_code}, oom_kill moved by {end.oom_kills}"]
        lines += [f"    {line}" for line in end.last_lines]
    return lines
