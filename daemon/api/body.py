"""Reading a request's body, with every way in which that goes wrong as an ApiError."""

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from daemon.api.errors import ApiError, invalid


async def read_body(request: web.Request) -> bytes:
    """The bytes of a JSON body. Raises ApiError: 400 (broken), 413 (too large), 415 (another content type)."""
    if request.content_type != "application/json":
        raise ApiError(415, "send content-type: application/json", code="unsupported_media_type")
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(413, "the body is larger than max_body_bytes", code="body_too_large") from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise invalid(f"the body could not be read: {error}", code="invalid_body") from None
