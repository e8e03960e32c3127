"""The control thread: its own thread, loop and applications for health, metrics and control, so that these answer while
the API's loop is drowning.

Owns the thread and its two sites: the unix socket, whose file permission is the key, and the admin port, if asked for.
It must not know what the routes do. Enter at `ControlThread`.
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from daemon.app import json_errors, named
from daemon.paths import AlreadyRunning
from daemon.sockets import listen
from engine.errors import ConfigError

log = logging.getLogger("inferd.control")

SOCKET_NAME = "control.sock"
_MOST_PATH_BYTES = 107  # of a unix socket's path
_CLOSE_S = 2.0


class ControlThread:
    """`local` are the routes on the unix socket at `directory`, `remote` those on `admin` (host, port)."""

    def __init__(
        self,
        directory: Path,
        local: Sequence[web.RouteDef],
        admin: tuple[str, int] | None,
        remote: Sequence[web.RouteDef],
        watch: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.path = directory / SOCKET_NAME
        self._sites = [(_unix_socket(self.path), local)]
        self.admin_port = 0
        if admin is not None:
            try:
                bound = listen(*admin)
            except Exception:
                self._close_unix()
                raise
            self.admin_port = bound[0].getsockname()[1]
            self._sites += [(each, remote) for each in bound]
        self._watch = watch
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._over = asyncio.Event()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the sites and end the thread; open event feeds are cut off."""
        if self._thread.ident is not None:
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(2 * _CLOSE_S)
        self._close_unix()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        runners = []
        watcher = asyncio.create_task(self._watch()) if self._watch else None
        for bound, routes in self._sites:
            app = web.Application(middlewares=[named, json_errors])
            app.add_routes(routes)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
            await runner.setup()
            await web.SockSite(runner, bound).start()
            runners.append(runner)
        await self._over.wait()
        if watcher is not None:
            watcher.cancel()
        for runner in runners:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(runner.cleanup(), _CLOSE_S)

    def _close_unix(self) -> None:
        for bound, _ in self._sites:
            bound.close()
        self.path.unlink(missing_ok=True)


def _unix_socket(path: Path) -> socket.socket:
    """A listening socket that only this user may use. One that a dead daemon left is replaced; for one that answers it
    raises AlreadyRunning."""
    if len(os.fsencode(path)) > _MOST_PATH_BYTES:
        raise ConfigError(f"the socket path {path} is too long", "set RUNTIME_DIRECTORY to a shorter one")
    if _answers(path):
        raise AlreadyRunning(f"another inferd listens on {path}", "stop it, or give this one its own RUNTIME_DIRECTORY")
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)  # the file must never be open to others, not even for a moment
    try:
        path.unlink(missing_ok=True)
        bound.bind(str(path))
        bound.listen(64)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror}") from error
    finally:
        os.umask(mask)
    return bound


def _answers(path: Path) -> bool:
    """Whether somebody listens there; one whose queue is full does too."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True
