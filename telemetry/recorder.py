"""The flight recorder: the last minutes of a process's events in a file that outlives it.

Owns the ring's format, its writer (`Recorder`) and its reader (`read_ring`). It must not know what an event means: it
stores bytes. Enter at `Recorder.open` in the process that lives, at `read_ring` in the one that looks afterwards.

A ring is a page of header and then records, each `magic, length, crc32, sequence, payload`, padded to 8 bytes. A
record's payload is written before its header, and the checksum covers sequence and payload, so whatever a SIGKILL
leaves behind is either a whole record or no record. There is no head pointer to trust: the reader looks for magics,
keeps what its checksum confirms, and sorts by sequence. Pages of a shared mapping belong to the kernel, so they
survive the process.
"""

import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

MAGIC = b"inferd-ring\x00"
VERSION = 1
HEADER_BYTES = 4096
DEFAULT_BYTES = 16 << 20
_HEADER = struct.Struct("<12sIQQQQ")  # magic, version, ring bytes, pid, start (monotonic ns), start (unix ns)
_LABEL_AT, _LABEL_BYTES = 64, 64
_CLEAN_AT = 128
_NOTE_AT, _NOTE_BYTES = 256, 1024
_RECORD_MAGIC = b"\xa5REC"
_RECORD = struct.Struct("<4sIIIQ")  # magic, payload bytes, crc32, zero, sequence
_CRC_SEED_MODULUS = 4_294_967_291  # the largest 32-bit prime: the whole sequence number takes part in the checksum


def ring_bytes(rows: int, steps_per_second: float = 50.0, seconds: float = 60.0) -> int:
    """Bytes that hold `seconds` of step reports of `rows` rows (16 bytes a row and 512 of facts), at least 1 MiB."""
    return max(1 << 20, int((512 + 16 * rows) * steps_per_second * seconds))


class Recorder:
    """The writer. `append` may be called from any thread; it never blocks on a disk and never raises."""

    def __init__(self, ring: mmap.mmap, path: Path | None, why_not_durable: str) -> None:
        self.path = path
        self.why_not_durable = why_not_durable  # empty: the ring is a file and survives this process
        self.refused = 0  # records larger than an eighth of the ring
        self._ring = ring
        self._size = len(ring)
        self._at = HEADER_BYTES
        self._sequence = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def durable(self) -> bool:
        return self.path is not None

    @classmethod
    def open(cls, path: Path | None, label: str, size_bytes: int = DEFAULT_BYTES, note: bytes = b"") -> "Recorder":
        """A new ring at `path`; a ring that lay there is kept beside it as `NAME.previous`.

        The file's blocks are reserved, because writing to a hole of a mapping on a full disk is a SIGBUS. Where they
        cannot be (or `path` is None) the ring is anonymous memory, and `why_not_durable` says so. `note` (at most
        1024 bytes) stays in the header, where no lap overwrites it.
        """
        size = max(HEADER_BYTES * 2, size_bytes & ~7)
        why, ring = "no state directory", None
        if path is not None:
            try:
                ring = _reserve(path, size)
            except OSError as error:
                why, path = f"{path}: {error.strerror or error}", None
        if ring is None:
            ring = mmap.mmap(-1, size)
        header = _HEADER.pack(MAGIC, VERSION, size, os.getpid(), time.monotonic_ns(), time.time_ns())
        ring[: len(header)] = header
        name = label.encode()[:_LABEL_BYTES]
        ring[_LABEL_AT : _LABEL_AT + len(name)] = name
        ring[_NOTE_AT : _NOTE_AT + len(note[:_NOTE_BYTES])] = note[:_NOTE_BYTES]
        return cls(ring, path, "" if path is not None else why)

    def append(self, payload: bytes) -> None:
        """Write one record. Payloads over an eighth of the ring are counted in `refused`, not written."""
        length = len(payload)
        step = (_RECORD.size + length + 7) & ~7
        if step * 8 > self._size:
            self.refused += 1
            return
        with self._lock:
            if self._closed:
                return
            ring, at = self._ring, self._at
            if at + step > self._size:
                ring[at : self._size] = bytes(self._size - at)  # no record of an older lap may follow this one
                at = HEADER_BYTES
            sequence = self._sequence = self._sequence + 1
            crc = zlib.crc32(payload, sequence % _CRC_SEED_MODULUS)
            body = at + _RECORD.size
            ring[body : body + length] = payload
            _RECORD.pack_into(ring, at, _RECORD_MAGIC, length, crc, 0, sequence)
            self._at = at + step

    def close(self, clean: bool = True) -> None:
        """Leave the mark of an orderly end, and let go of the mapping."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if clean:
                self._ring[_CLEAN_AT] = 1
            self._ring.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(clean=kind is None)


def _reserve(path: Path, size: int) -> mmap.mmap:
    """Create and reserve the file, and put it in place of an older one only when that worked. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        ring = mmap.mmap(descriptor, size)
        if path.exists():
            path.replace(previous(path))
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return ring


def previous(path: Path) -> Path:
    """Where `Recorder.open` keeps the ring of the life before."""
    return path.with_name(path.name + ".previous")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a ring holds: who wrote it, and the records that are whole, oldest first. A torn write only hurts the oldest
    record, so `missing`, the gaps between the others, is 0 unless the file itself was damaged."""

    label: str
    pid: int
    started_ns: int  # monotonic, of the writer's boot
    started_unix_ns: int
    clean: bool
    records: tuple[tuple[int, bytes], ...]  # (sequence, payload)
    missing: int
    note: bytes = b""


def read_ring(path: Path) -> Recording:
    """Read a ring, also while it is written or after its writer was killed.

    Raises OSError if it cannot be read, ValueError if it is no ring of this version.
    """
    data = path.read_bytes()
    if len(data) < HEADER_BYTES:
        raise ValueError(f"{path} is too short to be a flight recorder ring")
    magic, version, _, pid, started_ns, started_unix_ns = _HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"{path} is not a flight recorder ring of version {VERSION}")
    records = tuple(sorted(_records(data)))
    missing = records[-1][0] - records[0][0] + 1 - len(records) if records else 0
    return Recording(
        label=data[_LABEL_AT : _LABEL_AT + _LABEL_BYTES].rstrip(b"\0").decode(errors="replace"),
        pid=pid,
        started_ns=started_ns,
        started_unix_ns=started_unix_ns,
        clean=data[_CLEAN_AT] == 1,
        records=records,
        missing=missing,
        note=data[_NOTE_AT : _NOTE_AT + _NOTE_BYTES].rstrip(b"\0"),
    )


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Every record whose checksum holds, in file order."""
    at = data.find(_RECORD_MAGIC, HEADER_BYTES)
    while 0 <= at <= len(data) - _RECORD.size:
        _, length, crc, _, sequence = _RECORD.unpack_from(data, at)
        body = at + _RECORD.size
        payload = data[body : body + length]
        if len(payload) == length and zlib.crc32(payload, sequence % _CRC_SEED_MODULUS) == crc:
            yield sequence, payload
            at = body + length
        else:
            at += 1
        at = data.find(_RECORD_MAGIC, at)
