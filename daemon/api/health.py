"""/health*, /version and /metrics: answered without the engine, on the API port and by the control thread alike.

live = the daemon answers; startup = the engine was ready once; ready = it is, and made progress within its deadline.
Handlers take no lock that the API's loop could hold and ask the engine nothing. Enter at `Health.routes`.
"""

from collections.abc import Callable

import msgspec
from aiohttp import web

from daemon.lifecycle import Lifecycle

Render = Callable[[str], tuple[bytes, str]]


class Health:
    """`render` writes the metrics by Accept header; `authorize_metrics` raises ApiError if they are not open."""

    def __init__(
        self, lifecycle: Lifecycle, version: str, render: Render, authorize_metrics: Callable[[web.Request], None]
    ) -> None:
        self._lifecycle = lifecycle
        self._version = version
        self._render = render
        self._authorize_metrics = authorize_metrics

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.ready),
            web.get("/health/live", self.live),
            web.get("/health/ready", self.ready),
            web.get("/health/startup", self.startup),
            web.get("/version", self.version),
            web.get("/metrics", self.metrics),
        ]

    async def live(self, _: web.Request) -> web.Response:
        return self._answer(True, "")

    async def ready(self, _: web.Request) -> web.Response:
        return self._answer(*self._lifecycle.readiness())

    async def startup(self, _: web.Request) -> web.Response:
        started = self._lifecycle.was_ready
        return self._answer(started, "" if started else self._lifecycle.readiness()[1])

    async def version(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode({"version": self._version}), content_type="application/json")

    async def metrics(self, request: web.Request) -> web.Response:
        self._authorize_metrics(request)
        body, content_type = self._render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    def _answer(self, good: bool, why: str) -> web.Response:
        state = self._lifecycle.state
        body = {"status": "ok" if good else "unavailable", "state": state}
        return web.Response(
            status=200 if good else 503,
            body=msgspec.json.encode({**body, "why": why} if why else body),
            content_type="application/json",
            headers={} if good else {"Retry-After": "2"},
        )
