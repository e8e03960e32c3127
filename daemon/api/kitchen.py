"""Kitchen: what every generation needs, and the account of those that are going on.

Owns the two maps of live and broken-off requests. It must not know how one is served (daemon/api/generate.py).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from daemon.admission import Queue
from daemon.api.choice import Choice
from daemon.api.errors import ApiError
from daemon.api.prompt import Context
from daemon.api.textport import TextPort
from daemon.port import EnginePort
from telemetry.events import Event
from telemetry.redact import RequestSampler
from telemetry.tokenmix import TokenMixer


class Live(Protocol):
    """A request that is being served: daemon.api.generate.Generation."""

    id: str
    group_id: str
    task: "asyncio.Task[Any] | None"
    held: bool  # until the context limit is raised again

    @property
    def choices(self) -> Sequence[Choice]: ...

    def abort(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model as clients see it: `names[0]` is its name, the rest are aliases."""

    names: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    created: int  # unix seconds

    def check(self, model: str) -> None:
        """Raises ApiError (404) for a name that is not this model's."""
        if model not in self.names:
            raise ApiError(
                404, f"that model is not served here, {self.names[0]} is", code="model_not_found", param="model"
            )


@dataclass(slots=True, kw_only=True)
class Kitchen:
    """What every generation needs, and what is going on: `live` by response id, `settling` the broken-off ones."""

    port: EnginePort
    text: TextPort
    served: Served
    queue: Queue
    publish: Callable[[Event], None]
    authorize: Callable[[web.Request], None]  # raises ApiError (401)
    gate: Callable[[], None]  # raises ApiError (503) while nothing is served
    sampled: Callable[[str, bool | None], bool] = lambda _, parent: bool(parent)  # a trace, given its caller's decision
    why_context: Callable[[], str] = lambda: ""  # why the context limit in force is what it is
    holds: bool = False  # the policy for what is too long for the limit in force: it waits, or it is refused
    request_timeout_s: float = 0.0  # 0 = none
    sampler: RequestSampler | None = None  # of redacted bodies; None: none are kept
    mix: TokenMixer | None = None  # None: what tokens traffic is made of is not counted
    live: dict[str, Live] = field(default_factory=dict)
    settling: set[asyncio.Task[None]] = field(default_factory=set)

    def context(self) -> Context:
        """What a request may have of prompt and output now. Raises ApiError (503) if there is no engine."""
        view = self.port.view()
        if view.limits is None:
            raise ApiError(503, "the engine is not ready", code="engine_not_ready", retry_after_s=2)
        limit = view.limits.context_limit
        return Context(limit, view.resolved.max_model_len if view.resolved else limit, self.why_context())

    def abort(self, request_id: str) -> int:
        """Stop the choices of the requests with this id (a choice's, a response's, or X-Request-Id); how many."""
        found = [g for g in self.live.values() if request_id in (g.id, g.group_id)]
        found = found or [g for g in self.live.values() if any(c.request.id == request_id for c in g.choices)]
        return sum(generation.abort() for generation in found)

    async def empty(self, timeout_s: float) -> None:
        """Until nothing is going on any more, but no longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while tasks := {g.task for g in self.live.values() if g.task} | self.settling:  # the former make the latter
            await asyncio.wait(tasks, timeout=max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                return

    def sizes(self) -> dict[str, int]:
        """Every map here that can grow."""
        return {
            "api_live": len(self.live),
            "api_settling": len(self.settling),
            "api_held": sum(generation.held for generation in self.live.values()),
            **self.queue.sizes(),
            **(self.mix.sizes() if self.mix else {}),
        }
