"""Recorded traffic: the requests of a journal, or of a JSONL trace.

Owns the reading of both and what is wrong with a file. Enter at `recording`, or at `served` and `jobs_of`.
"""

from pathlib import Path

from autotune.workload import Job, Replay, shapes, trace
from engine.errors import ConfigError
from telemetry import journal
from telemetry.events import RequestRecord

_LONGEST_S = 7 * 86400.0


def recording(journal_path: str, trace_path: str) -> Replay:
    """The jobs of a journal, else of a trace. Raises ConfigError."""
    return Replay(shapes(served(journal_path)) if journal_path else jobs_of(trace_path))


def served(path: str) -> list[RequestRecord]:
    """Every record of a journal. Raises ConfigError if it cannot be read, or nothing was served."""
    try:
        found = [line.event for line in journal.read(Path(path)) if isinstance(line.event, RequestRecord)]
    except OSError as error:
        raise ConfigError(f"cannot read the journal {path}: {error.strerror}") from None
    if not any(record.output_tokens for record in found):
        raise ConfigError(f"the journal {path} has no request that was served")
    return found


def jobs_of(path: str) -> list[Job]:
    """The jobs of a trace. Raises ConfigError."""
    try:
        jobs = trace(Path(path).read_text(encoding="utf-8").splitlines())
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not jobs or jobs[-1].at_s > _LONGEST_S:
        raise ConfigError(f"the trace {path} is empty, or longer than a week")
    return jobs
