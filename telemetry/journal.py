"""The journal: what is worth keeping, one JSON line each, in a file that is rotated before it grows too large.

Owns the files, their order and their reading back. It keeps how requests ended and what the daemon did, not steps or
tokens, and never content. Enter at `Journal.take` (a sink of the bus) and `read`.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from telemetry import events
from telemetry.bus import Undelivered
from telemetry.events import AnyEvent, Event

FILE_BYTES = 16 << 20
FILES = 4  # the one that is written, and those before it
# These come many times a second, and the fold and the flight recorder have them.
NOT_KEPT = (events.StepReport, events.FirstToken, events.EngineStatus, events.LoopLag, events.MemoryReport)


class Line(msgspec.Struct, frozen=True, tag=False):
    """One line. `unix_seconds` is the event's stamp on the wall clock, which outlives a boot."""

    unix_seconds: float
    event: AnyEvent


class Journal:
    """Writes to `path`; `path.1` is the file before it, and so on. Not thread-safe: one sink, one thread."""

    def __init__(
        self,
        path: Path,
        file_bytes: int = FILE_BYTES,
        files: int = FILES,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._file_bytes = file_bytes
        self._files = files
        self._clock = clock
        self._wall = wall
        self._torn = False  # the last write may have stopped in the middle of a line

    def take(self, batch: list[Event]) -> None:
        """Append what is kept of the batch. Raises Undelivered when the disk does not take it."""
        kept = [event for event in batch if not isinstance(event, NOT_KEPT)]
        if not kept:
            return
        offset = self._wall() - self._clock() / 1e9
        text = b"".join(
            b'{"unix_seconds":%.3f,"event":%s}\n' % (offset + event.at_ns / 1e9, msgspec.json.encode(event))
            for event in kept
        )
        try:
            self._append(b"\n" + text if self._torn else text)
        except OSError as error:
            self._torn = True
            raise Undelivered(len(kept), f"{self._path}: {error.strerror or error}") from error
        self._torn = False

    def _append(self, text: bytes) -> None:
        """Raises OSError. The file is opened for each batch: it may be moved away, or its disk may come back."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while text:
                text = text[os.write(descriptor, text) :]
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size >= self._file_bytes:
            self._rotate()

    def _rotate(self) -> None:
        paths = [self._path, *(_older(self._path, number) for number in range(1, self._files))]
        for newer, older in reversed(list(itertools.pairwise(paths))):
            if newer.exists():
                newer.replace(older)
        self._path.unlink(missing_ok=True)  # if only one file is kept


def read(path: Path) -> Iterator[Line]:
    """Every line of the journal at `path` that is whole and known, oldest first. Raises OSError."""
    numbers = sorted(
        (int(p.suffix[1:]) for p in path.parent.glob(f"{path.name}.*") if p.suffix[1:].isdigit()), reverse=True
    )
    for file in (*(_older(path, number) for number in numbers), path):
        if not file.exists():
            continue
        with file.open("rb") as lines:
            yield from (line for line in map(_decoded, lines) if line is not None)


def tail(path: Path, most_bytes: int) -> list[Line]:
    """The newest lines of the journal at `path`, oldest first: those in its last `most_bytes`. Raises OSError."""
    lines: list[bytes] = []
    for file in (path, _older(path, 1)):
        if most_bytes <= 0 or (file != path and not file.exists()):
            break
        with file.open("rb") as opened:
            start = max(0, opened.seek(0, os.SEEK_END) - most_bytes)
            opened.seek(start)
            data = opened.read(most_bytes)
        most_bytes -= len(data)
        lines = data.split(b"\n")[1 if start else 0 :] + lines
    return [line for line in map(_decoded, lines) if line is not None]


def _decoded(line: bytes) -> Line | None:
    """None for a line that was torn by a full disk, or is of a later version."""
    try:
        return msgspec.json.decode(line, type=Line)
    except msgspec.DecodeError:
        return None


def _older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
