"""The ledger of a real engine with the default model: what is booked explains the process, and what is not shows."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from daemon import paths
from daemon.library import Library
from engine.config import EngineConfig
from telemetry import probe
from telemetry.events import EngineStarted, MemoryReport
from telemetry.fold import Fold
from telemetry.ladder import IN_USE, ladder
from tests.fakes.engine_hoards import HOARD_BYTES, argv
from tests.fakes.sessions import Running, read, request, session

pytestmark = pytest.mark.timeout(600)
_MIB = 1 << 20


def held_bytes(report: MemoryReport) -> int:
    return sum(report.measured.get(kind, 0) for kind in ("anonymous", "shared", "weights_mapped"))


def check_explained(report: MemoryReport) -> None:
    """Booked and runtime, without unbooked and allocator_cache, against what the process holds."""
    off, held = held_bytes(report) - sum(report.booked.values()), held_bytes(report)
    assert abs(off) <= min(0.03 * held, 64 * _MIB), (off / _MIB, held / _MIB, report.booked, report.measured)


async def next_report(running: Running, more: int = 2) -> MemoryReport:
    """One that was measured after this was called."""
    seen = len(running.of(MemoryReport))
    await running.until(lambda: len(running.of(MemoryReport)) >= seen + more, 150)
    report = running.of(MemoryReport)[-1]
    assert isinstance(report, MemoryReport)
    return report


def check_ladder(running: Running, resolved: dict[str, object]) -> None:
    fold = Fold("m")
    fold.take([event for event in running.events if isinstance(event, EngineStarted)])
    fold.take(running.events)
    with fold.reading() as state:
        known = ladder(state)
    assert known is not None
    assert known.source == "ledger"
    assert sum(known.owners.values()) == known.limit_bytes == resolved["memory_limit_bytes"]
    assert known.used_bytes == sum(known.owners.get(owner, 0) for owner in IN_USE)
    assert known.owners["neighbours"] >= 0
    assert known.owners["runtime"] > 50 * _MIB


async def test_what_is_booked_explains_the_process_idle_loaded_and_after_and_a_hoard_shows(tmp_path: Path) -> None:
    found = Library(paths.cache_dir(), lambda *_: None).prepare("smollm2")
    config = EngineConfig(model_dir=str(found.directory), memory_limit_bytes=3 << 30)
    async with session(tmp_path, config=config, argv=argv(), seconds=240) as running:
        view = running.session.view()
        assert view.pid is not None
        assert view.resolved is not None
        idle = await next_report(running)
        check_explained(idle)
        outside = probe.resident(view.pid)
        assert outside is not None
        assert abs(outside.anonymous_bytes + outside.shared_bytes - held_bytes(idle)) < 8 * _MIB, "idle: they agree"

        streams = [
            running.session.submit([request(f"r{i}", 24, tuple(range(1000 * i, 1000 * i + 200)))])[0] for i in range(8)
        ]
        answers = asyncio.gather(*(read(stream, seconds=200) for stream in streams))
        loaded = await next_report(running, more=2)
        assert loaded.booked["kv"] > idle.booked["kv"]
        check_explained(loaded)
        await answers
        after = await next_report(running)
        check_explained(after)
        assert loaded.measured["probe_ns"] < 1e9

        os.kill(view.pid, signal.SIGUSR2)
        hoarding = await next_report(running)
        shown = hoarding.measured["unbooked"] - after.measured["unbooked"]
        assert abs(shown - HOARD_BYTES) < 5 * _MIB, (shown / _MIB, after, hoarding)
        check_ladder(running, {"memory_limit_bytes": view.resolved.memory_limit_bytes})
