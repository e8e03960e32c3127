"""/inferd/v1: what operators, the TUI and the tuner read and do. Served by the control thread, never on the API port.

Reading asks the fold and the port's view; whatever needs the API's loop is handed to it with a time limit, so that this
answers (with less, or with 504) while that loop is blocked. It must not know how it is bound or who may call it: its
`authorize` does. Enter at `Control.routes`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from daemon.api.errors import ApiError, invalid
from daemon.api.schema import parse_object
from daemon.api.sending import taken
from daemon.port import EnginePort
from daemon.tuning import TunerOrder
from engine.errors import ConfigError, EngineFault
from runbooks import check as runbooks
from telemetry import account as accounts
from telemetry import feed as feeds
from telemetry import snapshot as snapshots
from telemetry.bundle import Folder
from telemetry.events import Incident, RequestRecord
from telemetry.feed import Feed
from telemetry.fold import Fold
from telemetry.semconv import TRACE_LEVELS

_REPLY_S = 3.0
_ASK_S = 1.0
_KEEPALIVE_S = 15.0

T = TypeVar("T")


class Doer(Protocol):
    """What the control routes can have done; all of it on the API's loop."""

    def drain(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self, request_id: str) -> int: ...

    async def steer(self, order: TunerOrder) -> dict[str, Any]: ...

    def tuner_status(self) -> dict[str, Any]: ...


class Tracing(Protocol):
    """The switch of the traces; safe from any thread."""

    @property
    def trace_level(self) -> str | None: ...  # None: they are sent nowhere

    def set_trace_level(self, level: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What the control routes are given. `loop` is the API's; `views` makes a snapshot's outside facts."""

    loop: asyncio.AbstractEventLoop
    port: EnginePort
    doer: Doer
    fold: Fold
    feed: Feed
    config: Mapping[str, Any]
    views: Callable[[], snapshots.Views]
    record: Callable[[str], RequestRecord | None]  # of a choice that has ended, by its id
    bundles: Folder
    drill: Callable[[str, int], Coroutine[Any, Any, dict[str, Any]]] | None = None  # starts one; None: none is armed
    tracing: Tracing


class Control:
    """Handlers; `authorize` raises ApiError for a caller without the right."""

    def __init__(self, desk: Desk, authorize: Callable[[web.Request], None]) -> None:
        self._desk = desk
        self._authorize = authorize

    def routes(self) -> list[web.RouteDef]:
        base = "/inferd/v1"
        guarded = self._guarded
        return [
            web.get(f"{base}/snapshot", guarded(self.snapshot)),
            web.get(f"{base}/events", guarded(self.events)),
            web.get(f"{base}/requests/{{id}}", guarded(self.request)),
            web.get(f"{base}/incidents", guarded(self.incidents)),
            web.get(f"{base}/incidents/{{id}}", guarded(self.incident)),
            web.get(f"{base}/decisions", guarded(self.decisions)),
            web.get(f"{base}/runbooks/{{name}}", guarded(self.runbook)),
            web.get(f"{base}/config", guarded(self.config)),
            web.post(f"{base}/drain", guarded(self.drain)),
            web.post(f"{base}/resume", guarded(self.resume)),
            web.post(f"{base}/abort/{{id}}", guarded(self.abort)),
            web.get(f"{base}/tuner", guarded(self.tuner_status)),
            web.post(f"{base}/tuner", guarded(self.tuner)),
            web.post(f"{base}/cache/reset", guarded(self.reset_cache)),
            *([web.post(f"{base}/drill/{{name}}", guarded(self.drill))] if self._desk.drill else []),
            web.post(f"{base}/memory/snapshot", guarded(self.memory)),
            web.post(f"{base}/trace-level", guarded(self.trace_level)),
        ]

    # -- read

    async def snapshot(self, request: web.Request) -> web.Response:
        """?include=a,b: those parts, else all but the engine's block map and live requests; ?map=0: `kv` without it."""
        asked = request.query.get("include")
        parts = [part for part in asked.split(",") if part] if asked is not None else None
        mapped = request.query.get("map") != "0"
        asked_engine = {"requests": "requests", "kv": "blocks"} if mapped else {"requests": "requests"}
        views = await self._with_engine(self._desk.views(), [asked_engine[p] for p in parts or [] if p in asked_engine])
        try:
            snapshot = snapshots.build(self._desk.fold, parts, views)
        except ValueError as error:
            raise invalid(str(error), "include") from None
        return web.Response(body=snapshots.encode(snapshot), content_type="application/json")

    async def _with_engine(self, views: snapshots.Views, wanted: list[str]) -> snapshots.Views:
        """Add what only the engine knows, if it is asked for and answers in time; else it stays 'not reported'. All
        are asked at once: a wedged engine costs one time limit."""
        found = dict(zip(wanted, await asyncio.gather(*map(self._engine_part, wanted)), strict=True))
        live, blocks, memory = found.get("requests"), found.get("blocks"), found.get("memory")
        return replace(
            views,
            live_requests=live if isinstance(live, list) else None,
            block_map=blocks if isinstance(blocks, bytes) else None,
            engine_memory=memory if isinstance(memory, dict) else None,
        )

    async def _engine_part(self, part: str) -> Any | None:
        try:
            return await self._on_api(self._desk.port.ask(part, _ASK_S), _ASK_S)
        except ApiError:
            return None

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events from now on; a comment every so often shows that the line is alive."""
        try:
            reader = self._desk.feed.reader()
        except OverflowError as error:
            raise ApiError(503, str(error), code="too_many_readers", retry_after_s=5) from None
        with reader:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            await response.write(b": connected\n\n")
            while True:
                try:
                    batch = await asyncio.wait_for(reader.batch(), _KEEPALIVE_S)
                    data = b"".join(feeds.to_sse(event) for event in batch)
                except TimeoutError:
                    data = b": alive\n\n"
                async with taken(request):  # readers are few: one that is stopped must not keep others out
                    await response.write(data)

    async def request(self, request: web.Request) -> web.Response:
        """The record of a finished choice, by its id or by X-Request-Id."""
        record = self._desk.record(request.match_info["id"])
        if record is None:
            raise ApiError(404, "no record of that request is kept", code="request_not_found")
        return _json(record)

    async def incidents(self, _: web.Request) -> web.Response:
        """Those of this life, and the ids of all bundles that are kept, newest first."""
        kept = await asyncio.to_thread(self._desk.bundles.ids)
        return _json({"incidents": self._incidents(), "bundles": kept})

    async def incident(self, request: web.Request) -> web.Response:
        """One incident; `report` is its bundle, null as long as (or if) there is none."""
        name = request.match_info["id"]
        known = {each.incident_id: each for each in self._incidents()}
        incident = known.get(name)
        where = Path(incident.bundle).stem if incident else name  # one of a burst has the bundle of the first
        report = await asyncio.to_thread(self._desk.bundles.read, where)
        if incident is not None:
            return _json({**msgspec.to_builtins(incident), "report": report})
        if report is not None:  # of a life before this one
            of_it = {field: getattr(report, field) for field in ("incident_id", "kind", "cause", "summary")}
            return _json({**of_it, "report": report})
        raise ApiError(404, "no such incident is kept", code="incident_not_found")

    def _incidents(self) -> list[Incident]:
        return snapshots.build(self._desk.fold, ["incidents"]).incidents or []

    async def decisions(self, _: web.Request) -> web.Response:
        return _json({"decisions": snapshots.build(self._desk.fold, ["decisions"]).decisions or []})

    async def runbook(self, request: web.Request) -> web.Response:
        """A runbook's Markdown, as `inferd doctor runbook NAME` prints it."""
        try:
            text = runbooks.text(request.match_info["name"])
        except KeyError:
            raise ApiError(404, f"runbooks are: {', '.join(runbooks.names())}", code="runbook_not_found") from None
        return web.Response(text=text, content_type="text/markdown")

    async def config(self, _: web.Request) -> web.Response:
        return _json(self._desk.config)

    # -- act

    async def drain(self, _: web.Request) -> web.Response:
        await self._on_api(_call(self._desk.doer.drain))
        return _json({"state": "draining"})

    async def resume(self, _: web.Request) -> web.Response:
        await self._on_api(_call(self._desk.doer.resume))
        return _json({"state": "serving"})

    async def abort(self, request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        count = await self._on_api(_call(lambda: self._desk.doer.abort(request_id)))
        if not count:
            raise ApiError(404, "no such request is running", code="request_not_found")
        return _json({"aborted_choices": count})

    async def tuner(self, request: web.Request) -> web.Response:
        """{"set": {limit: value}, "why"}: replace live limits, which pins them; {"pin": [limit]}; {"freeze": true};
        {"release": true} gives all of that back to the tuner."""
        body = parse_object(
            await request.read(), {"set": dict, "why": str, "freeze": bool, "release": bool, "pin": list}
        )
        changes, pin = body.get("set") or {}, body.get("pin") or []
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in changes.values()):
            raise invalid("limits are whole numbers", "set", "invalid_type")
        if not all(isinstance(name, str) for name in pin):
            raise invalid("limits are named by strings", "pin", "invalid_type")
        freeze, release = bool(body.get("freeze")), bool(body.get("release"))
        if not (changes or pin or freeze or release):
            raise invalid("nothing is asked for: set, pin, freeze or release", "set")
        order = TunerOrder(set_to=changes, why=body.get("why", ""), freeze=freeze, release=release, pin=tuple(pin))
        return _json(await self._on_api(self._desk.doer.steer(order)))

    async def tuner_status(self, _: web.Request) -> web.Response:
        return _json(await self._on_api(_call(self._desk.doer.tuner_status)))

    async def reset_cache(self, _: web.Request) -> web.Response:
        answer = await self._on_api(self._desk.port.act("reset_cache", _REPLY_S))
        if answer is None:
            raise ApiError(503, "the engine did not answer", code="engine_not_ready", retry_after_s=2)
        return _json({"result": answer})

    async def trace_level(self, request: web.Request) -> web.Response:
        """{"level": off | request | detail}, from the next record on."""
        level = parse_object(await request.read(), {"level": str}).get("level")
        if level not in TRACE_LEVELS:
            raise invalid(f"level must be one of {', '.join(TRACE_LEVELS)}", "level")
        before = self._desk.tracing.trace_level
        if before is None:
            raise ApiError(
                409, "traces are sent nowhere: OTEL_EXPORTER_OTLP_ENDPOINT is not set", code="traces_not_configured"
            )
        self._desk.tracing.set_trace_level(level)
        return _json({"level": level, "before": before})

    async def drill(self, request: web.Request) -> web.Response:
        """{"amount"}: start an armed drill; the answer says what it must raise. 'none' ends the one that is planted."""
        body = parse_object(await request.read() or b"{}", {"amount": int})
        assert self._desk.drill is not None  # else there is no such route
        started = await self._on_api(self._desk.drill(request.match_info["name"], int(body.get("amount") or 0)))
        return _json(started)

    async def memory(self, _: web.Request) -> web.Response:
        """Everything about memory at this instant: who has how much of it, down to blocks, choices and mappings."""
        views = await self._with_engine(self._desk.views(), ["requests", "blocks", "memory"])
        made = accounts.account(snapshots.build(self._desk.fold, accounts.PARTS, views), views.engine_memory)
        return web.Response(body=accounts.encode(made), content_type="application/json")

    # -- how

    def _guarded(
        self, handler: Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]
    ) -> Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]:
        async def guarded(request: web.Request) -> web.StreamResponse:
            self._authorize(request)
            return await handler(request)

        return guarded

    async def _on_api(self, work: Coroutine[Any, Any, T], timeout_s: float = _REPLY_S) -> T:
        """Run `work` on the API's loop. Raises ApiError: 504 if that loop does not answer in time."""
        future = asyncio.run_coroutine_threadsafe(work, self._desk.loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            raise ApiError(504, "the daemon's API loop does not answer", code="api_loop_blocked") from None
        except ConfigError as error:
            raise invalid(str(error), code=error.code) from None
        except EngineFault as error:
            raise ApiError(503, str(error), code=error.code, retry_after_s=2) from None


async def _call(function: Callable[[], T]) -> T:
    return function()


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
