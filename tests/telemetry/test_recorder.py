"""The flight recorder: what was appended can be read, whatever happened to the writer or the file."""

import errno
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from telemetry.recorder import HEADER_BYTES, Recorder, previous, read_ring, ring_bytes

SMALL = HEADER_BYTES + 8192


def payloads(path: Path) -> list[bytes]:
    return [payload for _, payload in read_ring(path).records]


def test_what_was_appended_is_read_in_order(tmp_path: Path) -> None:
    with Recorder.open(tmp_path / "ring", "engine") as recorder:
        for i in range(10):
            recorder.append(b"x" * i)
        recording = read_ring(tmp_path / "ring")  # while it is open
        assert [payload for _, payload in recording.records] == [b"x" * i for i in range(10)]
        assert (recording.label, recording.pid, recording.clean) == ("engine", os.getpid(), False)


def test_only_an_orderly_end_leaves_the_clean_mark(tmp_path: Path) -> None:
    Recorder.open(tmp_path / "good", "daemon").close()
    Recorder.open(tmp_path / "bad", "daemon").close(clean=False)
    assert read_ring(tmp_path / "good").clean
    assert not read_ring(tmp_path / "bad").clean


@pytest.mark.parametrize("laps", [0.5, 1.01, 3.7])
def test_a_ring_that_wrapped_holds_the_newest_unbroken_run(tmp_path: Path, laps: float) -> None:
    random_sizes = random.Random(7)
    with Recorder.open(tmp_path / "ring", "engine", SMALL) as recorder:
        written: list[bytes] = []
        while sum(map(len, written)) < laps * 8192:
            written.append(str(len(written)).encode() + b"." * random_sizes.randrange(300))
            recorder.append(written[-1])
        recording = read_ring(tmp_path / "ring")
    found = [payload for _, payload in recording.records]
    assert found == written[-len(found) :]
    assert recording.missing == 0
    assert sum(map(len, found)) > 4000 * min(laps, 1)


def test_a_record_too_large_is_counted_and_not_written(tmp_path: Path) -> None:
    with Recorder.open(tmp_path / "ring", "engine", SMALL) as recorder:
        recorder.append(b"x" * SMALL)
        recorder.append(b"small")
        assert recorder.refused == 1
    assert payloads(tmp_path / "ring") == [b"small"]


def test_the_ring_of_the_life_before_is_kept(tmp_path: Path) -> None:
    for word in (b"first", b"second", b"third"):
        with Recorder.open(tmp_path / "ring", "engine") as recorder:
            recorder.append(word)
    assert payloads(tmp_path / "ring") == [b"third"]
    assert payloads(previous(tmp_path / "ring")) == [b"second"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ring", "ring.previous"]


def test_a_full_disk_makes_it_anonymous_memory_and_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with Recorder.open(tmp_path / "ring", "engine") as recorder:
        recorder.append(b"still works")
        assert not recorder.durable
        assert "No space left" in recorder.why_not_durable
    assert list(tmp_path.iterdir()) == []


def test_it_is_readable_after_sigkill_in_the_middle_of_writing(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from telemetry.recorder import Recorder\n"
        f"recorder = Recorder.open(Path(sys.argv[1]), 'engine', {SMALL}); i = 0\n"
        "while True:\n"
        "    recorder.append(b'%d' % i + b'.' * (i % 200)); i += 1\n"
        "    if i == 5000: print('go', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "ring")], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"go\n"
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=60)
    recording = read_ring(tmp_path / "ring")
    numbers = [int(payload.split(b".")[0]) for _, payload in recording.records]
    assert not recording.clean
    assert recording.missing == 0
    assert len(numbers) > 20
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert numbers[-1] >= 4999


def test_damage_never_invents_a_record(tmp_path: Path) -> None:
    path, chance = tmp_path / "ring", random.Random(3)
    with Recorder.open(path, "engine", SMALL) as recorder:
        for i in range(200):
            recorder.append(b"%d" % i * (i % 9 + 1))
    whole, data = dict(read_ring(path).records), path.read_bytes()
    for _ in range(200):
        broken = bytearray(data)
        for _ in range(chance.randrange(1, 20)):
            at = chance.randrange(HEADER_BYTES, len(broken))
            patch = chance.choice([b"\xa5REC", chance.randbytes(8), b"\xff" * 24])
            broken[at : at + len(patch)] = patch
        del broken[SMALL - chance.randrange(3000) :]
        path.write_bytes(broken)
        survivors = dict(read_ring(path).records)
        assert survivors.items() <= whole.items()


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"\0" * HEADER_BYTES])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ring").write_bytes(content)
    with pytest.raises(ValueError, match="ring"):
        read_ring(tmp_path / "ring")


def test_the_default_size_holds_a_minute_of_steps() -> None:
    assert ring_bytes(rows=16) < 4 << 20
    assert ring_bytes(rows=256) >= 60 * 50 * (3072 + 1024 + 400)
