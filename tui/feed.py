"""The feed: a running daemon's snapshots and events, as frames, from threads of its own.

Owns the pace (one snapshot a second), reconnecting, and what is asked for: everything once, then only the figures, and
what only the engine knows only while a screen shows it. It must not know what is done with a frame. Enter at
`LiveFeed`; `Feed` is what a screen needs of any source.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from telemetry.client import Client, ClientError, Endpoint
from telemetry.events import Event
from tui.view import Frame

PERIOD_S: Final = 1.0
_FIGURES: Final = ("state", "limits", "latency", "time_breakdown", "queue", "totals", "kv", "memory", "findings")
_TIMEOUT_S: Final = 3.0
_KEPT_EVENTS: Final = 8192


class Feed(Protocol):
    """A source of frames. `deliver` is called on the feed's own thread, until `stop`."""

    replayed: bool

    def start(self, deliver: Callable[[Frame], None]) -> None: ...

    def stop(self) -> None: ...

    def want(self, parts: frozenset[str]) -> None:
        """Also bring what only the engine knows: any of 'requests', 'blocks'."""

    def post(self, path: str, body: Any = None) -> Any:
        """Act on the daemon. Raises ClientError, also where there is none to act on."""

    def seek(self, seconds: float) -> None:
        """Move in a recording; nothing happens on a live feed."""

    def pause(self, paused: bool) -> None:
        """Hold a recording; a live feed goes on."""


class LiveFeed:
    """Polls `endpoint` and follows its events."""

    replayed = False

    def __init__(self, endpoint: Endpoint, period_s: float = PERIOD_S) -> None:
        self._client = Client(endpoint, _TIMEOUT_S)
        self._period_s = period_s
        self._events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._wanted: frozenset[str] = frozenset()
        self._wake = threading.Event()
        self._over = threading.Event()
        self._known = False  # a whole snapshot was had since the last failure
        self._deliver: Callable[[Frame], None] = lambda frame: None

    def start(self, deliver: Callable[[Frame], None]) -> None:
        self._deliver = deliver
        threading.Thread(target=self._poll, name="top-poll", daemon=True).start()
        threading.Thread(target=self._follow, name="top-events", daemon=True).start()

    def stop(self) -> None:
        self._over.set()
        self._wake.set()

    def want(self, parts: frozenset[str]) -> None:
        if parts - self._wanted:
            self._wake.set()  # a screen was opened: it should not wait for the next second
        self._wanted = parts

    def post(self, path: str, body: Any = None) -> Any:
        return self._client.post(path, body)

    def seek(self, seconds: float) -> None: ...

    def pause(self, paused: bool) -> None: ...

    def _poll(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            self._once()
            self._wake.wait(max(0.05, self._period_s - (time.monotonic() - began)))
            self._wake.clear()

    def _once(self) -> None:
        try:
            whole = not self._known
            snapshot = self._client.snapshot(None if whole else _FIGURES, block_map=False)
            self._known = True
            taken = tuple(self._events.popleft() for _ in range(len(self._events)))
            asked = () if whole else _FIGURES
            self._send(Frame(at_ns=time.monotonic_ns(), snapshot=snapshot, asked=asked, events=taken))
            wanted = self._wanted
            if wanted:
                parts = tuple({"requests": "requests", "blocks": "kv"}[name] for name in sorted(wanted))
                snapshot = self._client.snapshot(parts)
                self._send(Frame(at_ns=time.monotonic_ns(), snapshot=snapshot, asked=parts))
        except ClientError as error:
            self._known = False
            self._send(Frame(at_ns=time.monotonic_ns(), error=str(error)))

    def _send(self, frame: Frame) -> None:
        if not self._over.is_set():
            self._deliver(frame)

    def _follow(self) -> None:
        """The snapshots say when the daemon is away; here it is only tried again."""
        while not self._over.is_set():
            try:
                for event in self._client.feed():
                    self._events.append(event)
                    if self._over.is_set():
                        return
            except ClientError:
                pass
            self._over.wait(self._period_s)
