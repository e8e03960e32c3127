"""`inferd doctor gameday`: which drills, where, and how the verdicts are told.

Owns the scratch directory and the table. Enter at `run`.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from daemon.drills import DRILLS, armed
from daemon.gameday import model as tiny
from daemon.gameday.play import PACE, Verdict, play
from daemon.library import Library
from daemon.paths import cache_dir
from daemon.progress import Progress


def run(model: str | None, only: Sequence[str], as_json: bool) -> int:
    """0 if every drill raised all it must. Raises ConfigError for a drill that is none, InferdError for a model that
    cannot be had."""
    names = armed(tuple(only)) or tuple(DRILLS)
    if model:
        _prepare(model)
    with tempfile.TemporaryDirectory(prefix="inferd-gameday-") as made:
        directory = Path(made)
        verdicts = play(names, model or str(tiny.write(directory / "model")), directory, _progress)
    good = all(verdict.good for verdict in verdicts)
    click.echo(json.dumps([_as_json(v) for v in verdicts], indent=1) if as_json else text(verdicts))
    return 0 if good else 1


def _prepare(model: str) -> None:
    """Once, and before fifteen daemons would each find that it is not there."""
    progress = Progress()
    try:
        Library(cache_dir(), progress).prepare(model)
    finally:
        progress.done()


def _progress(said: str) -> None:
    click.echo(said, err=True)


def _as_json(verdict: Verdict) -> dict[str, object]:
    return {**asdict(verdict), "good": verdict.good}


def text(verdicts: Sequence[Verdict]) -> str:
    """One line a drill, and beneath it what is missing."""
    lines = [f"{'drill':<16}{'metric':<8}{'alert':<8}{'finding':<45}remedy"]
    for verdict in verdicts:
        lines.append(
            f"{verdict.drill:<16}{_mark(verdict.moved, 'moved'):<8}{_mark(verdict.fired, 'fires'):<8}"
            f"{_mark(verdict.made, verdict.first or verdict.finding):<45}{_mark(verdict.works, verdict.remedy)}"
        )
        lines += [f"                {line}" for line in _missing(verdict)]
    good = sum(verdict.good for verdict in verdicts)
    seconds = sum(verdict.seconds for verdict in verdicts)
    lines.append(
        f"{good} of {len(verdicts)} good in {seconds:.0f} s; windows and waits of the rules {PACE:.0f} times as fast"
    )
    return "\n".join(lines)


def _mark(good: bool, what: str) -> str:
    return f"{'✓' if good else '✗'} {what}"


def _missing(verdict: Verdict) -> list[str]:
    found = [] if not verdict.error else [verdict.error]
    found += [] if verdict.moved else [f"{verdict.metric} did not move"]
    found += [] if verdict.fired else [f"{verdict.alert} does not fire"]
    found += [] if verdict.made else [f"the first finding should be {verdict.finding}"]
    return found + ([verdict.doubt] if verdict.doubt else [])
