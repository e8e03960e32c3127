"""Serving: one daemon from its bound sockets to its orderly end.

It owns lifetimes: of the bus, the engine, the API, the control thread, and what signals do to them. It must not know
flags (commands/serve.py), nor how the rooms know of each other (house.py). Enter at `Daemon.run`, which returns the
exit code.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from daemon.admission import Keys, is_loopback
from daemon.app import RUNNER_OPTIONS
from daemon.control_thread import ControlThread
from daemon.drills import armed, prepare_environment
from daemon.house import Engine, House, Model, Site
from daemon.instruments import Instruments
from daemon.lifecycle import systemd_notifier, watchdog_interval_s
from daemon.port import EngineView
from daemon.reload import Reload
from daemon.settings import Loaded
from daemon.sockets import BACKLOG, listen
from engine.errors import ConfigError
from telemetry import lag
from telemetry.events import Event

log = logging.getLogger("inferd")

_OBSERVE_S = 0.2
_WEIGH_S = 2.0
_LAST_ANSWERS_S = 3.0  # for handlers to write what the engine has said last
_LAST_RECORDS_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where the daemon listens, for people."""

    api: str
    admin: str | None
    control: Path


class Daemon:
    """Made when everything that can be refused has been; `on_ready` and `on_listening` tell people."""

    def __init__(
        self,
        loaded: Loaded,
        model: Model,
        make_engine: Callable[[Callable[[Event], None]], Engine],
        *,
        runtime_dir: Path,
        state_dir: Path,
        version: str,
        read: Callable[[], Loaded] | None = None,
        on_listening: Callable[[Addresses], None] = lambda _: None,
        on_ready: Callable[[EngineView], None] = lambda _: None,
    ) -> None:
        self._settings = loaded.settings
        self._loaded = loaded
        self._model = model
        self._make_engine = make_engine
        self._site = Site(runtime_dir=runtime_dir, state_dir=state_dir, version=version)
        self._read = read or (lambda: loaded)
        self._on_listening = on_listening
        self._on_ready = on_ready
        self._stop = asyncio.Event()
        self._reload = asyncio.Event()
        self._signals = 0
        self._had_terminal = _has_terminal()
        self._abandon: Callable[[], None] = lambda: None

    async def run(self) -> int:
        """Serve until told to stop. Raises InferdError for what cannot be served."""
        self._catch_signals()  # before anything is announced: who is told where to look may send one at once
        settings = self._settings
        armed(settings.drill)  # refuses a name that is none
        prepare_environment(settings.drill)
        keys = Keys.load(settings.api_key_file, settings.api_key)
        check_exposure(settings.host, keys)
        sockets = listen(settings.host, settings.port)
        try:
            return await self._with_sockets(sockets, keys)
        finally:
            for each in sockets:
                each.close()

    def stop(self) -> None:
        """Begin the orderly end."""
        self._stop.set()

    async def _with_sockets(self, sockets: list[socket.socket], keys: Keys) -> int:
        settings = self._settings
        name = (*settings.served_model_name, self._model.name)[0]
        with Instruments(name, self._site.state_dir, self._site.version, settings.slow_request) as instruments:
            self._abandon = instruments.abandon
            engine = self._make_engine(instruments.publish)
            house = House(self._loaded, self._model, self._site, engine, instruments, keys, systemd_notifier())
            try:
                house.control.start()
                house.rounds.start()
                runner = web.AppRunner(house.api, **RUNNER_OPTIONS)
                await runner.setup()
                for each in sockets:
                    await web.SockSite(runner, each, backlog=BACKLOG).start()
                self._on_listening(self._addresses(sockets, house.control))
                await self._serve(house)
                await runner.cleanup()
                await house.kitchen.empty(_LAST_RECORDS_S)  # of handlers that were cut off just now
            finally:
                await house.drills.close()
                house.rounds.stop()
                house.control.stop()
        return 0

    async def _serve(self, house: House) -> None:
        """From the engine's start to the last answer."""
        engine, lifecycle = house.engine, house.lifecycle
        chores = [
            asyncio.create_task(_every(_OBSERVE_S, lifecycle.observe)),
            asyncio.create_task(lag.watch("api", house.instruments.publish)),
            asyncio.create_task(self._reloads(house)),
            asyncio.create_task(_every(_WEIGH_S, house.instruments.weigh)),
            asyncio.create_task(house.tuning.run()),
        ]
        interval_s = watchdog_interval_s()
        if interval_s is not None:
            chores.append(asyncio.create_task(_every(interval_s, lambda: house.notify("WATCHDOG=1"))))
        lifecycle.observe()
        try:
            await engine.start()
            if await self._becomes_ready(engine):
                lifecycle.observe()
                await self._stop.wait()
            lifecycle.stopping()
            log.info("draining: %d requests run, the grace is %.0f s", len(house.kitchen.live), self._settings.grace)
            await engine.drain(self._settings.grace)
            await house.kitchen.empty(_LAST_ANSWERS_S)
            lifecycle.stopped()
        finally:
            await engine.drain(0.0)
            for chore in chores:
                chore.cancel()
            house.tuning.close()

    async def _becomes_ready(self, engine: Engine) -> bool:
        """Whether the engine is ready, rather than the daemon told to stop first. Raises what makes it hopeless."""
        ready = asyncio.create_task(engine.wait_ready())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((ready, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if self._stop.is_set() and not ready.done():
            ready.cancel()
            return False
        self._on_ready(ready.result())
        return True

    async def _reloads(self, house: House) -> None:
        """Read the settings again after each SIGHUP."""
        reload = Reload(self._loaded, self._read, house.engine.view, house.arbiter.propose)
        while True:
            await self._reload.wait()
            self._reload.clear()
            await reload.again()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: a test
                loop.add_signal_handler(signum, self._on_signal, signum)

    def _on_signal(self, signum: int) -> None:
        """The first one drains. A second Ctrl-C ends at once; the engine ends with its parent. A SIGHUP is a wish to
        read the settings again, unless it says that the terminal is gone in which this was started."""
        if signum == signal.SIGHUP and not (self._had_terminal and not _has_terminal()):
            self._reload.set()
            return
        self._signals += 1
        if self._signals > 1 and signum == signal.SIGINT:
            log.warning("interrupted again: ending at once")
            self._abandon()
            os._exit(130)
        log.info("%s: draining; Ctrl-C ends at once", signal.Signals(signum).name)
        self._stop.set()

    def _addresses(self, sockets: list[socket.socket], control: ControlThread) -> Addresses:
        settings = self._settings
        admin = f"http://{_netloc(settings.admin_host)}:{control.admin_port}" if control.admin_port else None
        port = sockets[0].getsockname()[1]
        return Addresses(api=f"http://{_netloc(settings.host)}:{port}", admin=admin, control=control.path)


def check_exposure(host: str, keys: Keys) -> None:
    """Raises ConfigError for an API without a key that others could reach."""
    if not keys and not is_loopback(host):
        raise ConfigError(
            f"host {host} can be reached from elsewhere, and there is no API key",
            "set --api-key-file or INFERD_API_KEY, or use --host 127.0.0.1",
        )


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal now."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _netloc(host: str) -> str:
    """For a URL that can be tried from here."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    return f"[{shown}]" if ":" in shown and not shown.startswith("[") else shown


async def _every(seconds: float, do: Callable[[], Any]) -> None:
    while True:
        await asyncio.sleep(seconds)
        do()
