"""Rounds: the doctor's checks inside the daemon, at a low rate, on a thread of its own.

Owns what the rounds remember between two looks: the history, what ended or died lately, and which findings hold. It
must not know any check. Enter at `Rounds`; `past` is a sink of the bus, `history` is shown in snapshots.

A finding is published when it is made or when its severity or section changes, and once more when it is over. One
more look confirms that it is over: what flickers at a threshold would ring twice.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from runbooks import check, gather
from runbooks.evidence import Evidence
from telemetry.events import Event, Finding
from telemetry.history import EVERY_SECONDS, History
from telemetry.snapshot import Snapshot

log = logging.getLogger("inferd.doctor")

# Of the snapshot: all that a check reads, and no lists that nobody would look at.
PARTS: Final = (
    *("state", "limits", "ceilings", "latency", "time_breakdown", "queue", "totals", "kv", "memory", "steps"),
    "history",
    "missed_targets",
)
_KEPT: Final = 1024
_LOOKS_TO_CLOSE: Final = 2


class Past:
    """A sink that remembers the newest of what checks look back to. Safe to read from any thread."""

    wants: Final[tuple[type[Event], ...]] = gather.PAST

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_KEPT)

    def take(self, batch: Sequence[Event]) -> None:
        self._events.extend(event for event in batch if isinstance(event, self.wants))

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events.copy())


class Rounds:
    """`look` gives a snapshot without asking the engine; `settings` are the daemon's, as they are shown."""

    def __init__(
        self,
        look: Callable[[], Snapshot],
        publish: Callable[[Event], None],
        history: History,
        past: Past,
        *,
        state_dir: Path,
        settings: Mapping[str, Any],
        every_seconds: float = EVERY_SECONDS,
    ) -> None:
        self._look = look
        self._publish = publish
        self._history = history
        self._past = past
        self._state_dir = state_dir
        self._settings = settings
        self._every_seconds = every_seconds
        self._books = check.shelf()
        self._open: dict[str, Finding] = {}
        self._absent: dict[str, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="doctor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def once(self) -> list[Finding]:
        """One look: keep a sample, run the checks, publish what is new and what is over."""
        self._history.take(self._look())
        snapshot = self._look()  # with the new sample in it
        pid = snapshot.state.engine_pid if snapshot.state else None
        evidence = Evidence(
            source="daemon",
            at_ns=snapshot.at_ns,
            unix_seconds=snapshot.unix_seconds,
            snapshot=snapshot,
            past=gather.dated(self._past, snapshot.at_ns),
            host=gather.host(self._state_dir, pid),
            settings=self._settings,
        )
        found = check.examine(evidence, self._books)
        self._announce(found, evidence.at_ns)
        return found

    def _announce(self, found: list[Finding], at_ns: int) -> None:
        present = {each.runbook: each for each in found}
        for name, each in present.items():
            before = self._open.get(name)
            self._absent.pop(name, None)
            if before is None or (before.severity, before.section) != (each.severity, each.section):
                self._open[name] = each
                self._publish(each)
                log.log(
                    logging.INFO if each.severity == "info" else logging.WARNING,
                    "%s: %s (inferd doctor runbook %s)",
                    name,
                    each.summary,
                    name,
                )
        for name in [name for name in self._open if name not in present]:
            self._absent[name] = self._absent.get(name, 0) + 1
            if self._absent[name] >= _LOOKS_TO_CLOSE:
                del self._absent[name]
                gone = self._open.pop(name)
                self._publish(msgspec.structs.replace(gone, at_ns=at_ns, active=False))
                log.info("%s is over: %s", name, gone.summary)

    def _run(self) -> None:
        while not self._over.wait(self._every_seconds):
            try:
                self.once()
            except Exception:  # the rounds must never take the daemon with them
                log.exception("a round of checks failed")
