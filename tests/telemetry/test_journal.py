"""The journal keeps what happened, within its bounds, whatever the disk does."""

import errno
import os
from pathlib import Path

import pytest

from telemetry import events
from telemetry.bus import Bus
from telemetry.journal import Journal, read

S = 1_000_000_000


def note(i: int) -> events.StateChanged:
    return events.StateChanged(at_ns=i * S, state="ready", why=f"number {i}")


def journal(path: Path, file_bytes: int = 1 << 20, files: int = 3) -> Journal:
    return Journal(path, file_bytes, files, clock=lambda: 100 * S, wall=lambda: 1_700_000_000.0)


def numbers(path: Path) -> list[int]:
    return [line.event.at_ns // S for line in read(path)]


def test_lines_come_back_with_the_time_of_the_wall_clock(tmp_path: Path) -> None:
    journal(tmp_path / "sub" / "j").take([note(90), events.FirstToken(at_ns=1, request_id="r", ttft_ns=1), note(91)])
    lines = list(read(tmp_path / "sub" / "j"))
    assert [line.event for line in lines] == [note(90), note(91)]
    assert lines[0].unix_seconds == pytest.approx(1_699_999_990)


def test_it_is_rotated_and_stays_within_its_bounds(tmp_path: Path) -> None:
    path = tmp_path / "j"
    for i in range(200):
        journal(path, file_bytes=500, files=3).take([note(i)])
    found = numbers(path)
    assert found == list(range(found[0], 200))  # the newest, without a gap, oldest first
    assert len(list(tmp_path.iterdir())) <= 3
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 3 * 700


def test_a_full_disk_is_counted_and_the_journal_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "j", os.write
    bus = Bus(None, {"journal": journal(path).take}, batch_seconds=0)
    bus.publish(note(1))
    assert bus.flush()

    def half_then_full(descriptor: int, data: bytes) -> int:
        if len(data) > 40:
            return write(descriptor, data[:40])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half_then_full)
        bus.publish(note(2))
        bus.publish(events.StepReport(at_ns=1, step=1))  # not the journal's: not lost
        assert bus.flush()
    assert bus.dropped() == {"journal": 1}
    bus.publish(note(3))
    bus.close()
    assert numbers(path) == [1, 3]
    assert path.read_bytes().count(b"\n") == 3  # the torn line is still there, and ended


def test_lines_of_a_later_version_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b'{"unix_seconds":1.0,"event":{"event":"Later","at_ns":1}}\nrubbish\n')
    journal(path).take([note(5)])
    assert numbers(path) == [5]


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    journal(tmp_path / "j").take([note(1)])
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o600
