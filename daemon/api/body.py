"""Reading a request's body, with every way in which that goes wrong as an ApiError."""

import asyncio
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from daemon.api.errors import ApiError, invalid

BODY_S: Final = 120.0  # a client that needs longer for what is at most `max_body` holds a connection for nothing


async def read_body(request: web.Request) -> bytes:
    """The bytes of a JSON body. Raises ApiError: 400 (broken), 408 (too slow), 413 (too large, known
    from its header if it has one), 415 (another content type)."""
    if request.content_type != "application/json":
        raise ApiError(415, "send content-type: application/json", code="unsupported_media_type")
    too_large = ApiError(413, "the body is larger than max_body", code="body_too_large")
    if (request.content_length or 0) > request.client_max_size:
        raise too_large
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_S:.0f} s", code="body_timeout") from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise invalid(f"the body could not be read: {error}", code="invalid_body") from None
