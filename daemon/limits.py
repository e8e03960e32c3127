"""The arbiter: the one writer of `Limits`. Tuner, API, TUI and SIGHUP propose to it; it checks, applies, announces.

It owns what was changed from an engine's own first limits, so that an engine which takes the place of a dead one serves
under the same. It must not know who proposes or why a value is good. Enter at `propose`.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict

from daemon.port import EnginePort
from engine.budget import Limits, Resolved
from engine.errors import EngineFault
from telemetry.events import Event, LimitsChanged, LimitsView


class LimitsArbiter:
    """Used from the daemon's loop. Two proposals at once are applied one after the other."""

    def __init__(self, port: EnginePort, publish: Callable[[Event], None]) -> None:
        self._port = port
        self._publish = publish
        self._changes: dict[str, int] = {}
        self._turn = asyncio.Lock()

    @property
    def changes(self) -> dict[str, int]:
        """Every limit that somebody changed, with its value."""
        return dict(self._changes)

    async def propose(self, changes: dict[str, int], source: str, why: str) -> Limits:
        """Replace the limits by themselves with `changes`; returns those in force.

        Raises ConfigError (no such limit, or out of its bounds: nothing changed), EngineFault (no engine).
        """
        async with self._turn:
            view = self._port.view()
            if view.limits is None or view.resolved is None:
                raise EngineFault(f"the engine is {view.state}", view.why)
            wanted = view.limits.replaced(changes).within(view.resolved)
            if wanted == view.limits:
                return wanted
            limits = await self._port.set_limits(wanted)
            self._changes.update(changes)
            self._announce(limits, source, why)
            return limits

    def restored(self, resolved: Resolved, limits: Limits) -> Limits:
        """The limits for an engine that has just become ready: its own, with what was changed before, as far as its
        ceilings allow."""
        ceilings = resolved.ceilings()
        kept = {name: min(value, ceilings[name]) for name, value in self._changes.items()}
        chosen = limits.replaced(kept)
        why = "as resolved" if chosen == limits else "as before the engine was restarted"
        self._announce(chosen, "start", why)
        return chosen

    def _announce(self, limits: Limits, source: str, why: str) -> None:
        view = LimitsView(**asdict(limits))
        self._publish(LimitsChanged(at_ns=time.monotonic_ns(), limits=view, source=source, why=why))
