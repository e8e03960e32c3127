"""Records the feeds that the screens' snapshots are made from: `python -m tests.tui.record`, some 40 seconds.

Two recordings of a real daemon with a tiny model: `healthy` under a load that it can bear, and `trouble`: a flood of
long prompts on a pool made small, preemptions, and an engine that is killed. A recording is a line a second with the
snapshot (what changes seldom only in the first) and the journal's lines for what was told between.
"""

import os
import signal
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from threading import Thread
from typing import IO

import msgspec

from telemetry.client import Client, ClientError, Endpoint
from telemetry.events import EngineStatus, Event, LoopLag, MemoryReport, RequestRecord, StepReport
from telemetry.journal import Line
from telemetry.snapshot import Snapshot
from tests.fakes.tiny_served import Load, tiny_served
from tests.served import Served, wait_for
from tui.replay import RecordedSnapshot

HERE = Path(__file__).parent
_SECONDS = 12
_STEPS = 60  # of the newest ones: a tiny model makes hundreds a second
_RECORDS = 40
_SELDOM = ("versions", "ceilings", "decisions", "incidents")
_PARTS = ("state", "limits", "latency", "time_breakdown", "queue", "totals", "requests", "kv", "memory", "findings")


class Tape:
    """One recording, as it is made."""

    def __init__(self, served: Served) -> None:
        self._client = Client(Endpoint(socket=served.runtime / "control.sock"))
        self._events: deque[Event] = deque()
        self.offset = time.time() - time.monotonic()
        Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        try:
            for event in self._client.feed():
                self._events.append(event)
        except ClientError:
            return

    def write(self, path: Path, seconds: int) -> None:
        snapshots: list[Snapshot] = []
        for second in range(seconds):
            began = time.monotonic()
            whole = self._client.snapshot()
            parts = self._client.snapshot(_PARTS)
            kept = {name: getattr(whole, name) for name in _SELDOM if second in (0, seconds - 1)}
            if parts.requests is not None and second < seconds - 1:
                kept["requests"] = msgspec.structs.replace(parts.requests, finished=[])
            snapshots.append(msgspec.structs.replace(parts, **kept))
            time.sleep(max(0.0, 1 - (time.monotonic() - began)))
        with path.open("wb") as file:
            self._lines(file, snapshots)

    def _lines(self, file: IO[bytes], snapshots: list[Snapshot]) -> None:
        last_ns = snapshots[-1].at_ns  # what came after it is no part of the recording
        seen = [
            e for e in self._events if e.at_ns <= last_ns and not isinstance(e, (EngineStatus, LoopLag, MemoryReport))
        ]
        steps = [e for e in seen if isinstance(e, StepReport)]
        records = [e for e in seen if isinstance(e, RequestRecord)]
        dropped = {id(e) for e in (*steps[:-_STEPS], *records[:-_RECORDS])}
        lines: list[RecordedSnapshot | Line] = [
            RecordedSnapshot(unix_seconds=s.unix_seconds, snapshot=s) for s in snapshots
        ]
        lines += [Line(self.offset + event.at_ns / 1e9, event) for event in seen if id(event) not in dropped]
        for line in sorted(lines, key=lambda line: (line.unix_seconds, isinstance(line, Line))):
            file.write(msgspec.json.encode(line) + b"\n")


def healthy(directory: Path) -> None:
    with tiny_served(directory, "--max-num-seqs", "16") as served:
        tape = Tape(served)
        with Load(served, clients=6, prompt="The river is long and the night is " * 3, tokens=60):
            time.sleep(6)
            tape.write(HERE / "healthy.jsonl", _SECONDS)


def trouble(directory: Path) -> None:
    with tiny_served(directory, "--max-num-seqs", "32") as served:
        change = {"set": {"kv_blocks": 96}, "why": "planted: a pool that is too small"}
        assert served.control("/inferd/v1/tuner", "POST", change)[0] == 200
        tape = Tape(served)
        with Load(served, clients=40, prompt="A long story that does not end " * 6, tokens=200):
            time.sleep(3)
            os.kill(served.engine_pid(), signal.SIGKILL)
            wait_for(lambda: not served.ready(), 60, "the death is noticed")
            wait_for(served.ready, 60, "the engine is back")
            served.control("/inferd/v1/tuner", "POST", change)
            time.sleep(2)
            tape.write(HERE / "trouble.jsonl", _SECONDS)


if __name__ == "__main__":
    for name in sys.argv[1:] or ("healthy", "trouble"):
        with tempfile.TemporaryDirectory() as made:
            {"healthy": healthy, "trouble": trouble}[name](Path(made))
        print(f"{name}: {(HERE / f'{name}.jsonl').stat().st_size:,} bytes")
