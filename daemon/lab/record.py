"""What the laboratory keeps of a run: one frozen schema for load tests, soaks, ablations and searches.

Owns the schema and its files. It must not know how anything is measured, judged or drawn. Enter at `Report`, `save` and
`load`. Seconds are of the run's own clock, which begins at 0; bytes, tokens and blocks are what their names say. Within
one SCHEMA fields are only added, each with a default, so that an older report can always be compared with.
"""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.errors import InferdError
from engine.machine import cpu
from telemetry import probe

SCHEMA: Final = 1


class ReportError(InferdError):
    """A report cannot be written or read."""

    code = "bad_report"
    exit_code = 2


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what a report is made of."""


class Request(Part, frozen=True, kw_only=True):
    """What one request saw, from the client's side. `error` is a bounded kind; empty = it went well."""

    at_s: float  # when it was sent
    kind: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    ttft_s: float | None = None
    whole_s: float
    gap_s: float | None = None  # mean between its tokens
    longest_gap_s: float | None = None
    error: str = ""


class Series(Part, frozen=True, kw_only=True):
    """One figure over time; None where nobody reported it. `name` is 'group.figure', as in memory.weights."""

    name: str
    unit: str  # bytes | tokens/s | requests | blocks | s | count
    at_s: tuple[float, ...]
    values: tuple[float | None, ...]


class Mark(Part, frozen=True, kw_only=True):
    """Something that happened: a decision of the tuner, a phase's begin."""

    at_s: float
    label: str
    detail: str = ""


class Verdict(Part, frozen=True, kw_only=True):
    """One judgement. `passed` None = it could not be judged, and `why` says what for."""

    name: str
    passed: bool | None
    why: str


class Run(Part, frozen=True, kw_only=True):
    """One measured stretch. Runs of the same `side` are repetitions of the same thing."""

    side: str
    repeat: int = 0
    seed: int = 0
    seconds: float
    settings: dict[str, Any] = {}
    figures: dict[str, float] = {}
    series: tuple[Series, ...] = ()
    requests: tuple[Request, ...] = ()
    gaps: dict[str, int] = {}  # upper edge of a bucket in seconds → gaps between tokens
    marks: tuple[Mark, ...] = ()
    limit_bytes: int | None = None
    notes: tuple[str, ...] = ()


class Effect(Part, frozen=True, kw_only=True):
    """One figure of one side against another's: the ratio of means, and its 95 % interval. `noise` None = it was
    measured once, so nobody can say."""

    figure: str
    side: str
    against: str
    ratio: float
    low: float | None = None
    high: float | None = None
    noise: bool | None = None


class Report(Part, frozen=True, kw_only=True):
    """One run of a `bench` or `tune search` command, whole."""

    schema: int = SCHEMA
    kind: str  # load | soak | ablation | search
    title: str
    started_at: str
    model: str
    settings: dict[str, Any] = {}  # what every run had in common
    versions: dict[str, str] = {}
    seeds: tuple[int, ...] = ()
    machine: dict[str, Any] = {}
    runs: tuple[Run, ...] = ()
    effects: tuple[Effect, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sides(self) -> list[str]:
        """In the order of their first run."""
        return list(dict.fromkeys(run.side for run in self.runs))

    def of(self, side: str) -> list[Run]:
        """The repetitions of one side."""
        return [run for run in self.runs if run.side == side]

    def values(self, side: str, figure: str) -> list[float]:
        """One figure in every repetition that has it."""
        return [run.figures[figure] for run in self.of(side) if figure in run.figures]


def changed(report: Report, **changes: Any) -> Report:
    """A copy with other values."""
    return msgspec.structs.replace(report, **changes)


def with_figures(run: Run, **more: float) -> Run:
    """A copy with further figures."""
    return msgspec.structs.replace(run, figures={**run.figures, **more})


def machine() -> dict[str, Any]:
    """The facts of this machine that figures depend on; no name, no address."""
    memory = probe.host_memory()
    return {
        "cpu": cpu()[1],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory.total_bytes if memory else None,
        "cgroup_limit_bytes": probe.cgroup().limit_bytes,
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
    }


def encode(report: Report) -> str:
    """JSON for people and programs."""
    return json.dumps(msgspec.to_builtins(report), indent=1, ensure_ascii=False)


def decode(data: bytes | str, where: str) -> Report:
    """Raises ReportError for what is no report, or one of another schema."""
    try:
        report = msgspec.json.decode(data, type=Report)
    except msgspec.DecodeError as error:
        raise ReportError(f"{where} is no report of inferd's: {error}", "give it a .json that --report wrote") from None
    if report.schema != SCHEMA:
        raise ReportError(f"{where} has schema {report.schema}, this inferd reads {SCHEMA}")
    return report


def load(path: Path) -> Report:
    """Raises ReportError."""
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from None


def check_writable(paths: Sequence[Path]) -> None:
    """Before an hour of measuring, not after it. Raises ReportError."""
    for path in paths:
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise ReportError(f"cannot write {path}", "name a file in a directory that exists")


def write(path: Path, text: str) -> None:
    """Whole or not at all. Raises ReportError."""
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}") from None
