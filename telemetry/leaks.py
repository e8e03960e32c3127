"""The leak detector: what an idle engine still holds, and what is larger at each idle moment than at the one before.

Owns what is suspicious. It reports and never acts: a wrong suspicion costs a line to read. Enter at
`LeakDetector.take`, a sink of the bus.

Two rules. An engine without requests has no KV block in use: if it has some twice in a row, they have lost their owner.
And a figure (a map, or resident memory) that was higher in each of several idle periods than in the one before, by
enough in all, does not come back to its idle value.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from telemetry.events import EngineEnded, EngineStatus, Event, Incident
from telemetry.evidence import Clue, Knob

_PERIODS: Final = 6
_LEAST_ENTRIES: Final = 64
_LEAST_BYTES: Final = 64 << 20
_BOUNDED: Final = frozenset({"prefixes", "bad_commands"})  # by the pool; by what others sent, once each
_RSS: Final = "resident_bytes"
_KNOBS: Final = (
    Knob("incident", "report it with this bundle: serving goes on"),
    Knob("restart", "a restart of the engine gives it back"),
)


class LeakDetector:
    """`publish` gets an Incident for each thing that is suspected, once in an engine's life."""

    wants: tuple[type[Event], ...] = (EngineStatus, EngineEnded)

    def __init__(
        self, publish: Callable[[Event], None], *, periods: int = _PERIODS, least_bytes: int = _LEAST_BYTES
    ) -> None:
        self._publish = publish
        self._periods = periods
        self._least_bytes = least_bytes
        self._forget()

    def _forget(self) -> None:
        self._idle_steps = -1  # steps done when the last idle period was looked at
        self._seen: dict[str, deque[int]] = {}
        self._suspected: set[str] = set()
        self._held_blocks = 0  # at the idle look before

    def take(self, batch: Sequence[Event]) -> None:
        for event in batch:
            if isinstance(event, EngineEnded):
                self._forget()
            elif isinstance(event, EngineStatus):
                self._look(event)

    def sizes(self) -> dict[str, int]:
        return {"leak_figures": len(self._seen)}

    def _look(self, status: EngineStatus) -> None:
        if status.running or status.waiting or status.sizes.get("sequences", 0) or status.state != "ready":
            self._held_blocks = 0
            return
        if status.kv_active and self._held_blocks:
            text = f"{status.kv_active} KV blocks are in use while there is no request"
            self._suspect("kv_blocks", text, status.at_ns)
        self._held_blocks = status.kv_active
        if status.steps == self._idle_steps:
            return  # the same idle period
        self._idle_steps = status.steps
        figures = {name: size for name, size in status.sizes.items() if name not in _BOUNDED}
        for name, size in {**figures, _RSS: status.rss_bytes}.items():
            self._grows(name, size, status.at_ns)

    def _grows(self, name: str, size: int, at_ns: int) -> None:
        seen = self._seen.setdefault(name, deque(maxlen=self._periods))
        if seen and size <= seen[-1]:
            seen.clear()
        seen.append(size)
        grown = size - seen[0]
        least = self._least_bytes if name == _RSS else _LEAST_ENTRIES
        if len(seen) == self._periods and grown >= least:
            unit = "bytes" if name == _RSS else "entries"
            self._suspect(name, f"{name} grew by {grown} {unit} over {len(seen)} idle periods, to {size}", at_ns)

    def _suspect(self, name: str, text: str, at_ns: int) -> None:
        if name in self._suspected:
            return
        self._suspected.add(name)
        self._publish(
            Incident(
                at_ns=at_ns,
                incident_id=f"leak_suspected-{at_ns}-{len(self._suspected)}",
                kind="leak_suspected",
                cause="leak_suspected",
                summary=f"while idle: {text}",
                clues=(Clue("leak", "for", text),),
                knobs=_KNOBS,
            )
        )
