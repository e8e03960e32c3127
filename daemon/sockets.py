"""Listening TCP sockets, bound before anything dear is begun, so that a taken port is known at once."""

import errno
import socket

from daemon.paths import AddressInUse
from engine.errors import ConfigError

BACKLOG = 1024


def listen(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of `host`, all on the same port (0: a free one). Raises AddressInUse, ConfigError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host {host!r} has no address: {error}") from error
    bound: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            if bound and port == 0:
                address = (address[0], bound[0].getsockname()[1], *address[2:])
            bound.append(_bind(family, address))
    except OSError as error:
        for each in bound:
            each.close()
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"{where} is in use", "stop what uses it, or choose another --port") from None
        raise ConfigError(f"cannot listen on {where}: {error.strerror}") from error
    return bound


def _bind(family: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made
