"""EnginePort: the one protocol through which the daemon speaks to an engine.

`daemon/session.py` is its first implementation (an engine process of ours); tests have a scripted one, and watching
somebody else's server can be another. So every field of what it reports may be 'not reported' (None).
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.budget import Limits, Resolved
from engine.output import Output
from engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """What is known of the engine now. `state`: starting | ready | draining | restarting | failed | stopped."""

    state: str
    why: str = ""
    engine_id: str = ""
    pid: int | None = None  # when it is ready
    process_pid: int | None = None  # also while it loads
    restarts: int = 0
    resolved: Resolved | None = None
    limits: Limits | None = None
    phases: dict[str, int] = field(default_factory=dict)
    progress_age_ns: int | None = None  # since the last step or idle tick
    running: int | None = None
    waiting: int | None = None


class OutputStream(Protocol):
    """The outputs of one choice. Iterating takes them (and so gives the engine credit): several steps' outputs are
    merged into one while nobody takes. Ends after the Output that has `finish`; never raises for an engine's death:
    that too is an Output with finish=error. Not read to the end, it must be closed by `cancel`."""

    request_id: str

    def __aiter__(self) -> AsyncIterator[Output]: ...

    def cancel(self, reason: str = "abort") -> None:
        """Tell the engine to stop this choice; its last Output still comes."""


class EnginePort(Protocol):
    """May be used from the daemon's main loop only, except `view`, which is safe from any thread."""

    def view(self) -> EngineView: ...

    def submit(self, requests: Sequence[Request]) -> list[OutputStream]:
        """Hand over the choices of one HTTP request. Raises engine.errors.EngineFault if the engine is not ready."""
        ...

    async def set_limits(self, limits: Limits) -> Limits:
        """Raises ConfigError if the engine refuses them, EngineFault if there is no engine."""
        ...

    async def ask(self, part: str, timeout_s: float = 1.0) -> Any | None:
        """A part of the engine's state, or None if not reported in time."""
        ...

    async def act(self, action: str, timeout_s: float = 5.0) -> Any | None: ...

    async def drain(self, grace_s: float) -> None:
        """Finish what runs within `grace_s`, then abort the rest and end the engine."""
        ...
