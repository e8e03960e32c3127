"""The arbiter: the one writer of `Limits`. Tuner, API, TUI and SIGHUP propose to it; it checks, applies, announces.

It owns what was changed from an engine's own first limits, by whom and why, so that an engine which takes the place of
a dead one serves under the same. It must not know who proposes or why a value is good. Enter at `propose`.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict

from daemon.port import EnginePort
from engine.budget import Limits, Resolved
from engine.errors import EngineFault
from telemetry.events import Event, LimitsChanged, LimitsView

Begin = Callable[[Resolved, Limits], tuple[Limits, str]]


class LimitsArbiter:
    """Used from the daemon's loop. Two proposals at once are applied one after the other."""

    def __init__(self, port: EnginePort, publish: Callable[[Event], None]) -> None:
        self._port = port
        self._publish = publish
        self._changes: dict[str, int] = {}
        self._reasons: dict[str, dict[str, str]] = {}
        self._turn = asyncio.Lock()
        self._begin: Begin = lambda _, limits: (limits, "as resolved")

    def begin_with(self, begin: Begin) -> None:
        """Who chooses the limits that an engine starts with."""
        self._begin = begin

    @property
    def changes(self) -> dict[str, int]:
        """Every limit that somebody changed, with its value."""
        return dict(self._changes)

    @property
    def reasons(self) -> dict[str, dict[str, str]]:
        """Of every limit that is not as resolved: `source` and `why`."""
        return {name: dict(reason) for name, reason in self._reasons.items()}

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
            self._reasons.update({name: {"source": source, "why": why} for name in changes})
            self._announce(limits, source, why)
            return limits

    def restored(self, resolved: Resolved, limits: Limits) -> Limits:
        """The limits for an engine that has just become ready: those to begin with, and what was changed before, as far
        as its ceilings allow."""
        ceilings = resolved.ceilings()
        begun, why = self._begin(resolved, limits)
        kept = {name: min(value, ceilings[name]) for name, value in self._changes.items()}
        chosen = begun.replaced(kept)
        for name, value in asdict(begun).items():
            if value != getattr(limits, name):
                self._reasons.setdefault(name, {"source": "start", "why": why})
        if chosen != begun:
            why = "as before the engine was restarted"
        self._announce(chosen, "start", why)
        return chosen

    def _announce(self, limits: Limits, source: str, why: str) -> None:
        view = LimitsView(**asdict(limits))
        self._publish(LimitsChanged(at_ns=time.monotonic_ns(), limits=view, source=source, why=why))
