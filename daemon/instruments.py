"""Instruments: the daemon's bus with its recorder, fold, feed and exposition, and the facts they ask for at a glance.

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
from telemetry.bus import Bus
from telemetry.events import Event
from telemetry.exposition import Exposition
from telemetry.feed import Feed
from telemetry.fold import Fold
from telemetry.metric import Outside
from telemetry.recorder import Recorder
from telemetry.snapshot import Views

_RING_NAME = "daemon.ring"


class Instruments:
    """`model` is the served name. The ring lies in `state_dir`."""

    def __init__(self, model: str, state_dir: Path, version: str) -> None:
        self._versions = {"inferd": version, "python": platform.python_version(), "system": platform.platform()}
        self._recorder = Recorder.open(state_dir / _RING_NAME, "daemon")
        self.fold = Fold(model)
        self.feed = Feed()
        self._bus = Bus(self._recorder, {"fold": self.fold.take, "feed": self.feed.take})
        self._exposition = Exposition(
            self.fold, outside=self._outside, build={"version": version, "python": self._versions["python"]}
        )
        self._more_sizes: Callable[[], Mapping[str, int]] = dict
        self.publish: Callable[[Event], None] = self._bus.publish

    def __enter__(self) -> "Instruments":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bus.close()
        self._recorder.close(clean=kind is None)

    def ask_sizes(self, sizes: Callable[[], Mapping[str, int]]) -> None:
        """Where the sizes of the other rooms' queues and maps come from; safe from any thread."""
        self._more_sizes = sizes

    def render(self, accept: str) -> tuple[bytes, str]:
        """The metrics: body and content type."""
        return self._exposition.render(accept)

    def views(self, engine: EngineView, config: Mapping[str, Any]) -> Views:
        """What a snapshot is given beside the fold."""
        return Views(
            engine_state=engine.state,
            engine_why=engine.why or None,
            daemon_resident_bytes=probe.resident_bytes(),
            daemon_sizes=self._sizes(),
            dropped=self._bus.dropped(),
            versions=self._versions,
            config=config,
        )

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
