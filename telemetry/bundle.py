"""Bundles: one fault as one JSON file and the same for people as Markdown, on disk before anybody asks.

Owns the folder: written whole or not at all, each capped, the oldest removed first. It must not judge (forensics.py) or
know what a fault is; what is written is casefile.py's, and its words are casetext.py's. Enter at `Folder.write`;
`Folder.read` gives one back.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from telemetry.casefile import Bundle
from telemetry.casetext import to_markdown

FOLDER: Final = "incidents"  # in the state directory
MOST_BYTES: Final = 512 << 10  # of one bundle's JSON
KEPT: Final = 32
_ID: Final = re.compile(r"[a-z_]+-[0-9a-f-]{1,48}")


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
