"""The bundle: what was seen, in one archive for the morning, without secrets and without what anybody wrote.

Owns the archive's members. Everything in it comes from events, which carry no content, and from settings whose secrets
are masked; logs and environment stay out. Enter at `write`.
"""

import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from runbooks import report
from runbooks.evidence import Evidence
from telemetry import snapshot
from telemetry.events import Finding

_COPIED: Final = ("journal.jsonl", "daemon.ring", "engine.ring")  # of the state directory, if they are there
_MOST_BYTES: Final = 64 << 20  # of one copied file: its newest part


def write(path: Path, evidence: Evidence, findings: Sequence[Finding]) -> list[str]:
    """A .tar.gz at `path`, readable by its owner only; the names of its members. Raises OSError."""
    members = {
        "report.txt": report.text(evidence, findings).encode(),
        "report.json": json.dumps(report.as_json(evidence, findings), indent=2).encode(),
        "snapshot.json": snapshot.encode(evidence.snapshot),
        "past.jsonl": b"".join(msgspec.json.encode([d.age_seconds, d.event]) + b"\n" for d in evidence.past),
        "settings.json": json.dumps(dict(evidence.settings or {}), indent=2, default=str).encode(),
        "host.json": msgspec.json.encode(evidence.host),
    }
    directory = Path(evidence.host.state_dir) if evidence.host.state_dir else None
    for name in _COPIED if directory else ():
        assert directory is not None
        data = _newest(directory / name)
        if data is not None:
            members[f"state/{name}"] = data
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(f"inferd-bundle/{name}")
            info.size, info.mode, info.mtime = len(data), 0o600, int(evidence.unix_seconds)
            archive.addfile(info, io.BytesIO(data))
    return list(members)


def _newest(path: Path) -> bytes | None:
    """The file's last bytes; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MOST_BYTES))
            return file.read(_MOST_BYTES)
    except OSError:
        return None
