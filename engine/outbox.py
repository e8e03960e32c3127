"""Outbox: telemetry on its way out of the engine process: batched, merged under load, dropped last and counted.

Owns what was not sent yet, and when it is sent: each frame wakes the daemon in the middle of a step, so step reports
wait for each other, and whatever else there is goes at once. It never blocks and never raises: `post` says whether it
took a frame. Enter at `put` and `flush`.
"""

from collections.abc import Callable

from engine import wire
from engine.report import merged
from telemetry.events import EngineStatus, Event, StepReport

_MOST_MERGED = 256  # steps in one report: a merged report's columns grow with it
_PACE_NS = 200_000_000  # the longest that a step report waits for others


class Outbox:
    """`post` takes one frame without blocking and says whether it did; `capacity` is in events."""

    def __init__(self, post: Callable[[bytes], bool], capacity: int = 256) -> None:
        self._post = post
        self._capacity = capacity
        self._waiting: list[Event] = []
        self._due_ns = 0  # when the oldest step report has waited long enough; 0 = now
        self.dropped = 0  # events, for ever

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, event: Event) -> None:
        """Keep `event` for the next flush."""
        if not isinstance(event, StepReport):
            self._due_ns = 0
        elif not self._waiting:
            self._due_ns = event.at_ns + _PACE_NS
        self._waiting.append(event)
        if len(self._waiting) > self._capacity:
            self._compress()

    def flush(self, now_ns: int | None = None) -> None:
        """Send all that waits as one frame, if there is room now; otherwise it goes on waiting. With `now_ns`, only if
        it is due by then."""
        if not self._waiting or (now_ns is not None and now_ns < self._due_ns):
            return
        if self._post(wire.encode_events(self._waiting)):
            self._waiting = []

    def _compress(self) -> None:
        """Merge neighbouring step reports, keep only the last heartbeat, then drop the oldest down to the half."""
        kept: list[Event] = []
        last_report = -1  # index in `kept`
        for event in self._waiting:
            if isinstance(event, StepReport):
                before = kept[last_report] if last_report >= 0 else None
                if isinstance(before, StepReport) and before.merged + event.merged <= _MOST_MERGED:
                    kept[last_report] = merged(before, event)
                    continue
                last_report = len(kept)
            kept.append(event)
        beats = [event for event in kept if isinstance(event, EngineStatus)]
        kept = [event for event in kept if not isinstance(event, EngineStatus) or event is beats[-1]]
        excess = max(0, len(kept) - self._capacity // 2)
        self.dropped += excess
        self._waiting = kept[excess:]
