"""The event feed: a sink of the bus that any number of readers may follow, each at its own pace.

Owns one bounded queue per reader and the text of a server-sent event. It must not know HTTP. Enter at `Feed.take` (the
sink) and `Feed.reader` (on the event loop that reads).
"""

import asyncio
import contextlib
import threading
from collections import deque
from types import TracebackType

import msgspec

from telemetry.events import AnyEvent, Event

QUEUE_EVENTS = 1024
READERS = 32


class Feed:
    """Fans events out. A reader that is too slow loses the oldest events; `lost` counts them over all readers."""

    def __init__(self, queue_events: int = QUEUE_EVENTS) -> None:
        self.lost = 0
        self._queue_events = queue_events
        self._readers: set[Reader] = set()
        self._lock = threading.Lock()

    @property
    def readers(self) -> int:
        return len(self._readers)

    def take(self, batch: list[Event]) -> None:
        """Give every reader the batch. Called on the bus's thread."""
        with self._lock:
            for reader in self._readers:
                self.lost += reader.put(batch)

    def reader(self) -> "Reader":
        """A reader of all events from now on; to be used in a `with`. Raises OverflowError beyond 32 readers."""
        reader = Reader(self, asyncio.get_running_loop(), self._queue_events)
        with self._lock:
            if len(self._readers) >= READERS:
                raise OverflowError(f"the event feed has {READERS} readers already")
            self._readers.add(reader)
        return reader

    def forget(self, reader: "Reader") -> None:
        with self._lock:
            self._readers.discard(reader)


class Reader:
    """One follower of the feed: `batch` on its loop, `put` on the bus's thread."""

    def __init__(self, feed: Feed, loop: asyncio.AbstractEventLoop, queue_events: int) -> None:
        self._feed = feed
        self._loop = loop
        self._queue: deque[Event] = deque(maxlen=queue_events)
        self._queue_events = queue_events
        self._ready = asyncio.Event()

    async def batch(self) -> list[Event]:
        """The events since the last call, at least one; waits for it."""
        while not self._queue:
            self._ready.clear()
            if not self._queue:  # what was put before `clear` is seen here, what comes later sets it again
                await self._ready.wait()
        return [self._queue.popleft() for _ in range(len(self._queue))]

    def put(self, batch: list[Event]) -> int:
        """Append; returns how many of the oldest were lost for it."""
        lost = max(0, len(self._queue) + len(batch) - self._queue_events)
        self._queue.extend(batch)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the reader with it
            self._loop.call_soon_threadsafe(self._ready.set)
        return lost

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._feed.forget(self)


def to_sse(event: Event) -> bytes:
    """One server-sent event: `event:` is its type's name, `data:` its JSON (bytes as base64)."""
    return b"event: %s\ndata: %s\n\n" % (type(event).__name__.encode(), msgspec.json.encode(event))


def from_sse(data: bytes | str) -> Event:
    """The event of a `data:` field. Raises msgspec.DecodeError, also for an event of a later version."""
    return msgspec.json.decode(data, type=AnyEvent)
