"""The browser form: textual-serve on loopback, one `inferd top` a tab.

Owns the door: only with the token in the address that was printed, and only for pages of our own origin, since
whoever gets in can act on the daemon. It must not know what is served. Enter at `serve`.
"""

import hmac
import secrets
import shlex
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from aiohttp import web
from textual_serve.server import Server

_COOKIE: Final = "inferd_top"
_PAGE: Final = Path(__file__).parent / "web"  # our own: the library's takes its font from another host
_HOST: Final = "127.0.0.1"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Browser(Server):
    """Serves `command` on `port` of loopback; `announce` gets the address once it can be opened."""

    def __init__(self, command: Sequence[str], port: int, announce: Callable[[str], None]) -> None:
        super().__init__(shlex.join(command), host=_HOST, port=port, title="inferd top", templates_path=_PAGE)
        self._token = secrets.token_urlsafe(16)
        self._announce = announce

    async def on_startup(self, app: web.Application) -> None:
        self._announce(f"http://{_HOST}:{self.port}/?token={self._token}")

    async def _make_app(self) -> web.Application:
        app: web.Application = await super()._make_app()
        app.middlewares.append(self._door)
        return app

    @web.middleware
    async def _door(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The token comes in the address once, then as a cookie. A page of another origin has neither right."""
        origin = request.headers.get("Origin")
        if request.host != f"{_HOST}:{self.port}" or origin not in (None, f"http://{_HOST}:{self.port}"):
            raise web.HTTPForbidden(text="inferd top: only from the address that was printed")
        asked = request.query.get("token", "")
        if not any(hmac.compare_digest(given, self._token) for given in (asked, request.cookies.get(_COOKIE, ""))):
            raise web.HTTPForbidden(text="inferd top: open the address that was printed, token included")
        response = await handler(request)
        if asked and not response.prepared:
            response.set_cookie(_COOKIE, self._token, httponly=True, samesite="Strict")
        return response

    def serve(self, debug: bool = False) -> None:
        """The library's, but it listens before the address is announced: who opens it at once is not refused. Raises
        OSError if the port is taken."""
        self.debug = debug
        with socket.create_server((_HOST, self.port)) as listening:
            web.run_app(self._make_app(), sock=listening, print=lambda *_: None)


def serve(command: Sequence[str], port: int, announce: Callable[[str], None]) -> None:
    """Until interrupted. Raises OSError if the port is taken."""
    Browser(command, port, announce).serve()
