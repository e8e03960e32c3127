"""Instruments: the daemon's bus with its recorder and sinks, the exposition, and the facts they ask for at a glance.

Owns their wiring. It must not know requests or the engine. Enter at `Instruments`, a context manager.
"""

import asyncio
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

import msgspec

from daemon.port import EngineView
from daemon.rounds import Past
from daemon.shortage import Shortage
from engine.errors import InferdError
from telemetry import probe
from telemetry.bundle import FOLDER, Folder
from telemetry.bus import Bus, Sink
from telemetry.events import AnyEvent, Event, Incident, MemoryReport, RequestRecord, StateChanged
from telemetry.exposition import Exposition
from telemetry.feed import Feed
from telemetry.fold import Fold
from telemetry.history import History
from telemetry.journal import NOT_KEPT, Journal
from telemetry.leaks import LeakDetector
from telemetry.metric import Outside
from telemetry.otlp import metrics_from, pace_seconds, traces_from
from telemetry.postmortem import Casebook, Note, previous_life
from telemetry.recorder import Recorder
from telemetry.sampling import Head
from telemetry.slowlog import SlowLog
from telemetry.snapshot import Views

_RING_NAME = "daemon.ring"
_ENGINE_RING_NAME = "engine.ring"
_JOURNAL_NAME = "journal.jsonl"
_CATCH_UP_SECONDS = 0.05  # a reader waits at most so long for the fold to have what was published before


class Instruments:
    """`model` is the served name. Ring and journal lie in `state_dir`; traces go where OTEL_* says, else nowhere."""

    def __init__(self, model: str, state_dir: Path, version: str, slow_request_s: float = 0.0) -> None:
        self._versions = {"inferd": version, "python": platform.python_version(), "system": platform.platform()}
        ring, engine_ring = state_dir / _RING_NAME, state_dir / _ENGINE_RING_NAME
        note = Note(oom_kills=probe.cgroup().oom_kills, boot_id=probe.boot_id(), versions=self._versions)
        before = previous_life(ring, engine_ring, note)
        self._recorder = Recorder.open(ring, "daemon", note=note.encode())
        self.fold = Fold(model)
        self.bundles = Folder(state_dir / FOLDER)
        casebook = self._casebook = Casebook(self.bundles, self.fold, engine_ring, self._versions, self._catch_up)
        leaks = LeakDetector(self.publish)
        self._more_sinks = (casebook, leaks)
        self.feed = Feed()
        self._head = Head.from_environ(os.environ)
        self._traces = traces_from(version)
        self._metrics = metrics_from(version)
        self._state_dir = state_dir
        self.history, self.past = History(), Past()
        sinks: dict[str, Sink] = {
            "fold": self.fold.take,
            "feed": self.feed.take,
            "journal": Journal(state_dir / _JOURNAL_NAME).take,
            "bundle": casebook.take,
            "leaks": leaks.take,
            "doctor": self.past.take,
        }
        pace: dict[str, float] = {}
        kept = tuple(kind for kind in get_args(AnyEvent) if kind not in NOT_KEPT)
        wants: dict[str, tuple[type[Event], ...]] = {
            "bundle": casebook.wants,
            "leaks": leaks.wants,
            "doctor": Past.wants,
            "journal": kept,
        }
        if slow_request_s:
            sinks["slow_log"], wants["slow_log"] = SlowLog(slow_request_s).take, SlowLog.wants
        if self._traces is not None:
            sinks["trace"], pace["trace"], wants["trace"] = self._traces.take, pace_seconds(), self._traces.wants
        if self._metrics is not None:
            sinks["otlp_metrics"], pace["otlp_metrics"] = self._metrics.take, pace_seconds()
            wants["otlp_metrics"] = self._metrics.wants
        self._bus = Bus(self._recorder, sinks, pace=pace, wants=wants)
        self._exposition = Exposition(
            self.fold, outside=self._outside, build={"version": version, "python": self._versions["python"]}
        )
        self._shortage = Shortage(self.publish)
        self._more_sizes: Callable[[], Mapping[str, int]] = dict
        self._progress_age_ns: Callable[[], int | None] = lambda: None
        if before is not None:
            casebook.keep(before)
            self.publish(before.incident)

    def __enter__(self) -> "Instruments":
        logging.getLogger().addHandler(self._shortage)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        logging.getLogger().removeHandler(self._shortage)
        crash = error is not None and not _orderly(error)
        if crash:
            self.publish(StateChanged(at_ns=time.monotonic_ns(), state="stopped", why=f"{type(error).__name__}"))
        self._bus.close()
        for sender in (self._traces, self._metrics):
            if sender is not None:
                sender.close()
        self._recorder.close(clean=not crash)

    def publish(self, event: Event) -> None:
        """Record now, deliver soon. An incident is told where its bundle will lie."""
        if isinstance(event, Incident) and not event.bundle:
            event = msgspec.structs.replace(event, bundle=str(self._casebook.place(event)))
        self._bus.publish(event)

    def abandon(self) -> None:
        """The process is about to leave without cleaning up, because somebody told it to: not a case for forensics."""
        self._recorder.close(clean=True)

    def ask_sizes(self, sizes: Callable[[], Mapping[str, int]]) -> None:
        """Where the sizes of the other rooms' queues and maps come from; safe from any thread."""
        self._more_sizes = sizes

    def ask_progress(self, age_ns: Callable[[], int | None]) -> None:
        """Where the age of the engine's last sign of life comes from; safe from any thread."""
        self._progress_age_ns = age_ns

    def sampled(self, trace_id: str, parent: bool | None) -> bool:
        """Whether a request's trace is kept, given its caller's decision. Without an exporter it is the caller's
        alone: an exemplar must not point to a trace that exists nowhere."""
        if self._traces is None or self._traces.level == "off":
            return bool(parent)
        return self._head.decide(trace_id, parent)

    @property
    def trace_level(self) -> str | None:
        """One of telemetry.trace.LEVELS; None if traces are sent nowhere."""
        return None if self._traces is None else self._traces.level

    def set_trace_level(self, level: str) -> None:
        """From the next record on; safe from any thread. Does nothing if traces are sent nowhere."""
        if self._traces is not None:
            self._traces.level = level

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
            dropped=self._dropped(),
            versions=self._versions,
            config=config,
            history=self.history.samples,
            state_dir=str(self._state_dir),
            daemon_pid=os.getpid(),
            engine_pid=engine.process_pid or engine.pid,
        )

    def weigh(self) -> None:
        """Publish what this process takes: on a host it shares the engine's memory."""
        held = probe.resident()
        if held is None:
            return
        measured = {"anonymous": held.anonymous_bytes, "shared": held.shared_bytes, "file": held.file_bytes}
        self.publish(
            MemoryReport(
                at_ns=time.monotonic_ns(),
                process="daemon",
                device="cpu",
                booked={"runtime": held.total_bytes},
                measured=measured,
            )
        )

    def _catch_up(self) -> None:
        self._bus.flush(_CATCH_UP_SECONDS, sink="fold")

    def _outside(self) -> Outside:
        return Outside(
            dropped=self._dropped(),
            sizes=self._sizes(),
            resident_bytes=probe.resident_bytes(),
            cpu_seconds=probe.cpu_seconds(os.getpid()),
            progress_age_ns=self._progress_age_ns(),
            pressure_us=probe.pressure_us(),
        )

    def _dropped(self) -> dict[str, int]:
        lost = self._bus.dropped()
        if self._metrics is not None:
            lost["otlp_metrics"] += self._metrics.failed_exports
        return lost

    def _sizes(self) -> dict[str, int]:
        queues = {f"bus_{name}": waiting for name, waiting in self._bus.queued().items()}
        for sink in self._more_sinks:
            queues |= sink.sizes()
        return {**queues, **self.fold.sizes(), "feed_readers": self.feed.readers, **self._more_sizes()}


def _orderly(error: BaseException) -> bool:
    """Ends that somebody asked for, or that were explained to whoever started us."""
    return isinstance(error, InferdError | KeyboardInterrupt | SystemExit | asyncio.CancelledError)
