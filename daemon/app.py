"""The API's aiohttp application: routes, who is let in, errors as JSON, request ids, CORS for allowed origins.

Owns what holds for every route of the API port. It must not know bodies or the engine. Enter at `build_api`;
`RUNNER_OPTIONS` are what its runner needs so that a client that leaves cancels its handler.
"""

import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from daemon.admission import FrontDoor
from daemon.api.errors import ApiError
from daemon.api.openai import REQUEST_ID, TRACE, error_response, internal_error

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# handler_cancellation: a client that leaves, streaming or not, cancels its handler at once.
RUNNER_OPTIONS: Final[dict[str, Any]] = {
    "handler_cancellation": True,
    "access_log": None,
    "shutdown_timeout": 2.0,
    "keepalive_timeout": 75.0,
}


def build_api(routes: Sequence[web.RouteDef], door: FrontDoor, *, max_body_bytes: int) -> web.Application:
    """The application of the API port."""
    app = web.Application(client_max_size=max_body_bytes, middlewares=[named, json_errors, _let_in(door)])
    app.add_routes(routes)
    app.on_response_prepare.append(_headers(door))
    return app


@web.middleware
async def named(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request an id: the client's X-Request-Id if it is well-formed, else a new one."""
    asked = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = asked if _REQUEST_ID.fullmatch(asked) else secrets.token_hex(16)
    return await handler(request)


@web.middleware
async def json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong is a JSON error in OpenAI's shape."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = {404: "no such route", 405: f"method {request.method} is not allowed here"}.get(
            error.status, error.reason
        )
        response = error_response(ApiError(error.status, message, code=_code(error.status)))
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return response
    except (ConnectionResetError, web.GracefulExit):
        raise
    except Exception:  # noqa: BLE001 - it is logged with its traceback
        return error_response(internal_error(request))


def _code(status: int) -> str:
    return {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}.get(status, "http_error")


def _let_in(door: FrontDoor) -> Middleware:
    @web.middleware
    async def let_in(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        door.check(request.headers.get("Host"), origin)
        if request.method == "OPTIONS" and origin is not None and door.allows_origin(origin):
            return web.Response(
                status=204,
                headers={
                    "Access-Control-Allow-Methods": "GET, POST",
                    "Access-Control-Allow-Headers": "authorization, content-type, x-request-id, traceparent",
                    "Access-Control-Max-Age": "600",
                },
            )
        return await handler(request)

    return let_in


def _headers(door: FrontDoor) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    async def add(request: web.Request, response: web.StreamResponse) -> None:
        request_id = request.get(REQUEST_ID)
        if request_id is not None:
            response.headers["X-Request-Id"] = request_id
        trace = request.get(TRACE)
        if trace is not None:
            response.headers["traceresponse"] = trace.response
        origin = request.headers.get("Origin")
        if origin is not None and door.allows_origin(origin):  # nobody is, unless the operator said so
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, traceresponse"
            response.headers["Vary"] = "Origin"

    return add
