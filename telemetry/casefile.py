"""Case files: all that is kept of one fault, as one flat value.

Owns the format (`Bundle`, the same from version to version: fields are added, never renamed). It must not judge
(forensics.py), render (casetext.py) or know files (bundle.py). Enter at `Bundle`.
"""

from typing import Any, Final

import msgspec

from telemetry.events import Decision, LimitsView, StepReport
from telemetry.evidence import Clue, Knob, MemoryFault, ProcessEnd

FORMAT: Final = 1


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
