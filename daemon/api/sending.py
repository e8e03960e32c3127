"""Writing to clients that may not read.

Owns how long a write may take and what becomes of a client that takes nothing. Enter at `taken`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

log = logging.getLogger("inferd.api")

SEND_S = 120.0  # who reads nothing for so long has left, whatever the connection says: it holds a row, or a place


@asynccontextmanager
async def taken(request: web.Request) -> AsyncIterator[None]:
    """Around writes of an answer. Raises ConnectionResetError, after breaking it off, if they take too long."""
    try:
        async with asyncio.timeout(SEND_S):
            yield
    except TimeoutError:
        log.warning("%s: the client has read nothing for %.0f s and is taken to have left", request.path, SEND_S)
        if request.transport is not None:
            request.transport.abort()  # what it was sent and did not take is not waited for
        raise ConnectionResetError("the client does not read") from None
