"""The bus: one `publish`, from any thread, that never blocks, never raises and never loses without counting.

Owns the order of things: an event is in the flight recorder before `publish` returns; then each sink gets it from a
queue and a thread of its own, so that a slow or broken sink costs nobody else anything. It must not know what events
mean or what sinks do with them. Enter at `Bus`.

A sink is a callable that takes a batch of events. It always runs on its own thread, so it may block, and may own
things that are bound to a thread (a socket). Batching waits a moment after the first event: wake-ups, not events, are
what telemetry would cost.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from telemetry import events
from telemetry.events import Event
from telemetry.recorder import Recorder
from telemetry.threads import name_this_thread

log = logging.getLogger(__name__)

Sink = Callable[[list[Event]], None]


class Undelivered(Exception):
    """Raised by a sink that knows how many of the batch's events it lost; any other error counts the whole batch."""

    def __init__(self, count: int, why: str) -> None:
        super().__init__(why)
        self.count = count


QUEUE_EVENTS = 8192
BATCH_EVENTS = 512
BATCH_SECONDS = 0.2


class Bus:
    """Publishes to a recorder (or none) and to named sinks."""

    def __init__(
        self,
        recorder: Recorder | None,
        sinks: Mapping[str, Sink],
        *,
        queue_events: int = QUEUE_EVENTS,
        batch_seconds: float = BATCH_SECONDS,
        pace: Mapping[str, float] | None = None,
        wants: Mapping[str, tuple[type[Event], ...]] | None = None,
    ) -> None:
        """`batch_seconds` is how long a sink waits after an event for more of them; `pace` has it for some by name.
        `wants` are the only events that a sink is given; one that is not in it gets all."""
        self._recorder = recorder
        self._unrecorded = 0
        paces = {**dict.fromkeys(sinks, batch_seconds), **(pace or {})}
        self._wants = dict(wants or {})
        self._outlets = tuple(_Outlet(name, sink, queue_events, paces[name]) for name, sink in sinks.items())
        self._takers: dict[type[Event], tuple[_Outlet, ...]] = {}  # filled as kinds of events turn up

    def publish(self, event: Event) -> None:
        """Record `event` now, hand it to every sink soon. Not to be called from a signal handler: it takes a lock."""
        if self._recorder is not None:
            try:
                self._recorder.append(events.encode(event))
            except Exception:
                self._unrecorded += 1
                if self._unrecorded == 1:
                    log.exception("an event could not be recorded; more of these are only counted")
        kind = type(event)
        takers = self._takers.get(kind)
        if takers is None:
            takers = self._takers[kind] = self._takers_of(kind)
        for outlet in takers:
            outlet.put(event)

    def _takers_of(self, kind: type[Event]) -> "tuple[_Outlet, ...]":
        return tuple(outlet for outlet in self._outlets if kind in self._wants.get(outlet.name, (kind,)))

    def dropped(self) -> dict[str, int]:
        """Events lost so far: by sink, and by the recorder."""
        lost = {outlet.name: outlet.lost for outlet in self._outlets}
        if self._recorder is not None:
            lost["recorder"] = self._unrecorded + self._recorder.refused
        return lost

    def queued(self) -> dict[str, int]:
        """Events that wait, by sink."""
        return {outlet.name: outlet.waiting for outlet in self._outlets}

    def cpu_ns(self) -> dict[str, int]:
        """Thread CPU time that each sink has used."""
        return {outlet.name: outlet.cpu_ns for outlet in self._outlets}

    def flush(self, timeout_s: float = 5.0, sink: str | None = None) -> bool:
        """Wait until every event published so far was taken (or lost), by one sink or by all. False if that took
        longer than `timeout_s`. Flush the fold before a scrape or snapshot, and it shows what its reader just did."""
        deadline = time.monotonic() + timeout_s
        return all([outlet.flush(deadline) for outlet in self._outlets if sink in (None, outlet.name)])

    def close(self, timeout_s: float = 2.0) -> None:
        """Deliver what waits and stop the sinks; one that hangs is left behind after `timeout_s`. The recorder stays
        open: its owner decides whether the end was a clean one."""
        for outlet in self._outlets:
            outlet.stop()
        deadline = time.monotonic() + timeout_s
        for outlet in self._outlets:
            outlet.join(max(0.0, deadline - time.monotonic()))


class _Outlet:
    """One sink with its queue and its thread."""

    def __init__(self, name: str, sink: Sink, queue_events: int, batch_seconds: float) -> None:
        self.name = name
        self.lost = 0
        self.cpu_ns = 0
        self._sink = sink
        self._failed = False
        self._capacity = queue_events
        self._batch_seconds = batch_seconds
        self._queue: deque[Event] = deque()
        self._busy = 0  # events taken from the queue and not yet delivered
        self._wake = threading.Event()
        self._idle = threading.Condition()
        self._hurry = threading.Event()  # somebody flushes or closes: do not wait for a fuller batch
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"telemetry-{name}", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._queue) + self._busy

    def put(self, event: Event) -> None:
        if len(self._queue) >= self._capacity or self._stopping:
            self._lose(1)
            return
        self._queue.append(event)
        if not self._wake.is_set():
            self._wake.set()

    def flush(self, deadline: float) -> bool:
        with self._idle:
            self._hurry.set()
            self._wake.set()
            done = self._idle.wait_for(lambda: self.waiting == 0, max(0.0, deadline - time.monotonic()))
            self._hurry.clear()
        return done

    def stop(self) -> None:
        self._stopping = True
        self._hurry.set()
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        self._lose(len(self._queue))  # the sink hangs, or a publisher came in while the thread ended

    def _lose(self, count: int) -> None:
        with self._idle:
            self.lost += count

    def _run(self) -> None:
        name_this_thread(f"tel-{self.name}")
        while True:
            self._wake.wait()
            self._hurry.wait(self._batch_seconds)
            self._wake.clear()  # before draining: what is put from here on wakes us again
            while self._queue:
                self._deliver()
            with self._idle:
                self._idle.notify_all()
            self.cpu_ns = time.thread_time_ns()
            if self._stopping and not self._queue:
                return

    def _deliver(self) -> None:
        self._busy = min(len(self._queue), BATCH_EVENTS)
        batch = [self._queue.popleft() for _ in range(self._busy)]
        try:
            self._sink(batch)
        except Exception as error:
            known = isinstance(error, Undelivered)
            self._lose(error.count if isinstance(error, Undelivered) else len(batch))
            if not self._failed:
                self._failed = True
                log.error(
                    "telemetry sink %r failed: %s; further failures are only counted",
                    self.name,
                    error,
                    exc_info=not known,  # a bug needs its traceback; a full disk does not
                )
        self._busy = 0
