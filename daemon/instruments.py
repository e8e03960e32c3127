"""Instruments: the daemon's bus with its recorder and sinks, the exposition, and the facts they ask for at a glance.

Owns their wiring. It must not know requests or the engine. Enter at `Instruments`, a context manager.
"""

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from daemon.port import EngineView
from telemetry import probe
from telemetry.bus import Bus, Sink
from telemetry.events import Event, RequestRecord
from telemetry.exposition import Exposition
from telemetry.feed import Feed
from telemetry.fold import Fold
from telemetry.journal import Journal
from telemetry.metric import Outside
from telemetry.otlp import traces_from
from telemetry.recorder import Recorder
from telemetry.snapshot import Views

_RING_NAME = "daemon.ring"
_JOURNAL_NAME = "journal.jsonl"
_TRACE_PACE_SECONDS = 1.0  # an export costs a round trip: gather records for it
_CATCH_UP_SECONDS = 0.05  # a reader waits at most so long for the fold to have what was published before


class Instruments:
    """`model` is the served name. Ring and journal lie in `state_dir`; traces go where OTEL_* says, else nowhere."""

    def __init__(self, model: str, state_dir: Path, version: str) -> None:
        self._versions = {"inferd": version, "python": platform.python_version(), "system": platform.platform()}
        self._recorder = Recorder.open(state_dir / _RING_NAME, "daemon")
        self.fold = Fold(model)
        self.feed = Feed()
        self._traces = traces_from(version)
        sinks: dict[str, Sink] = {
            "fold": self.fold.take,
            "feed": self.feed.take,
            "journal": Journal(state_dir / _JOURNAL_NAME).take,
        }
        if self._traces is not None:
            sinks["trace"] = self._traces.take
        pace = {"trace": _TRACE_PACE_SECONDS} if self._traces is not None else None
        self._bus = Bus(self._recorder, sinks, pace=pace)
        self._exposition = Exposition(
            self.fold, outside=self._outside, build={"version": version, "python": self._versions["python"]}
        )
        self._more_sizes: Callable[[], Mapping[str, int]] = dict
        self.publish: Callable[[Event], None] = self._bus.publish

    def __enter__(self) -> "Instruments":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bus.close()
        if self._traces is not None:
            self._traces.close()
        self._recorder.close(clean=kind is None)

    def ask_sizes(self, sizes: Callable[[], Mapping[str, int]]) -> None:
        """Where the sizes of the other rooms' queues and maps come from; safe from any thread."""
        self._more_sizes = sizes

    def render(self, accept: str) -> tuple[bytes, str]:
        """The metrics: body and content type."""
        self._catch_up()
        return self._exposition.render(accept)

    def record(self, request_id: str) -> RequestRecord | None:
        """The record of a choice that has ended, while it is kept."""
        self._catch_up()
        return self.fold.record(request_id)

    def views(self, engine: EngineView, config: Mapping[str, Any]) -> Views:
        """What a snapshot is given beside the fold, which then knows what was published before."""
        self._catch_up()
        return Views(
            engine_state=engine.state,
            engine_why=engine.why or None,
            daemon_resident_bytes=probe.resident_bytes(),
            daemon_sizes=self._sizes(),
            dropped=self._bus.dropped(),
            versions=self._versions,
            config=config,
        )

    def _catch_up(self) -> None:
        self._bus.flush(_CATCH_UP_SECONDS, sink="fold")

    def _outside(self) -> Outside:
        return Outside(
            dropped=self._bus.dropped(),
            sizes=self._sizes(),
            resident_bytes=probe.resident_bytes(),
            cpu_seconds=probe.cpu_seconds(os.getpid()),
        )

    def _sizes(self) -> dict[str, int]:
        queues = {f"bus_{name}": waiting for name, waiting in self._bus.queued().items()}
        return {**queues, **self.fold.sizes(), "feed_readers": self.feed.readers, **self._more_sizes()}
