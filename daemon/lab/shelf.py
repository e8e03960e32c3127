"""Where reports go: an HTML page at the path that was asked for, and its JSON beside it.

Owns the two files of a report, and how a load test becomes one. Enter at `check` before measuring, `keep` after it.
"""

from pathlib import Path
from typing import Any

from daemon.lab import record
from daemon.lab.gather import run_of
from daemon.lab.page import page
from daemon.lab.record import Report, ReportError
from daemon.lab.watch import Watch
from daemon.load.report import Run, warnings


def paths(target: str) -> tuple[Path, Path]:
    """Page and JSON. Raises ReportError for a name that is not a page's."""
    path = Path(target)
    if path.suffix not in (".html", ".htm"):
        raise ReportError(f"{target!r} is not a page's name", "end it in .html; the JSON is written beside it")
    return path, path.with_suffix(".json")


def check(target: str) -> None:
    """Before an hour of measuring, not after it. Raises ReportError."""
    record.check_writable(paths(target))


def keep(target: str, report: Report) -> None:
    """Write both. Raises ReportError."""
    html, json = paths(target)
    record.write(json, record.encode(report) + "\n")
    record.write(html, page(report))


def keep_load(target: str, found: dict[str, Any], run: Run, watch: Watch) -> None:
    """The report of one `bench load`; `found` is its summary. Raises ReportError."""
    notes = [*warnings(found), *([watch.why_not] if watch.why_not else [])]
    one = run_of(
        run.samples,
        run.began_s,
        run.ended_s,
        side=found["scenario"],
        watch=watch,
        seed=found["seed"],
        settings=watch.settings,
        notes=tuple(notes),
    )
    report = Report(
        kind="load",
        title=f"Load test: {found['scenario']}, {found['load']}",
        started_at=found["started_at"],
        model=found["model"],
        versions=watch.versions,
        seeds=(found["seed"],),
        machine=record.machine(),
        runs=(one,),
    )
    keep(target, report)
