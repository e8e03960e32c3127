"""Serving: one daemon from its bound sockets to its orderly end. Composes every other room; decides nothing itself.

It owns the lifetime of what it composes: bus, engine, API, control thread, signals. It must not know flags (commands/
serve.py) or how anything works inside. Enter at `Daemon.run`, which returns the exit code.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from autotune.watch import PARTS as TUNING_PARTS
from daemon.admission import FrontDoor, Keys, Queue, is_loopback
from daemon.api.access import Access, AdminAccess
from daemon.api.control import Control, Desk
from daemon.api.health import Health
from daemon.api.kitchen import Kitchen, Served
from daemon.api.openai import OpenAi
from daemon.api.textport import TextPort
from daemon.app import RUNNER_OPTIONS, build_api
from daemon.control_thread import ControlThread
from daemon.drills import Drills, armed, prepare_environment
from daemon.instruments import Instruments
from daemon.lifecycle import Lifecycle, systemd_notifier, watchdog_interval_s
from daemon.limits import LimitsArbiter
from daemon.port import EnginePort, EngineView
from daemon.reload import Reload
from daemon.rounds import PARTS as ROUNDS_PARTS
from daemon.rounds import Rounds
from daemon.settings import Loaded
from daemon.sockets import BACKLOG, listen
from daemon.tuning import TunerOrder, Tuning
from engine.budget import Limits, Resolved
from engine.errors import ConfigError
from telemetry import lag, snapshot
from telemetry.events import Event
from telemetry.redact import RequestSampler
from telemetry.tokenmix import TokenMixer, install_salt

log = logging.getLogger("inferd")

_OBSERVE_S = 0.2
_WEIGH_S = 2.0
_LAST_ANSWERS_S = 3.0  # for handlers to write what the engine has said last
_LAST_RECORDS_S = 2.0
_START_UP_ROWS = 64  # of the queue, while the engine's rows are not known


class Engine(EnginePort, Protocol):
    """An EnginePort with a life of its own: daemon.session.EngineSession."""

    async def start(self) -> None: ...

    async def wait_ready(self) -> EngineView: ...

    def on_limits(self, choose: Callable[[Resolved, Limits], Limits]) -> None: ...

    def sizes(self) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is served: its default name, its text side, its end tokens."""

    name: str
    text: TextPort
    eos_token_ids: tuple[int, ...]


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
        self._runtime_dir = runtime_dir
        self._state_dir = state_dir
        self._version = version
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
        with Instruments(name, self._state_dir, self._version, settings.slow_request) as instruments:
            self._abandon = instruments.abandon
            engine = self._make_engine(instruments.publish)
            arbiter = LimitsArbiter(engine, instruments.publish)
            tuning = self._tuning(engine, arbiter, instruments, name)
            arbiter.begin_with(tuning.begin)
            engine.on_limits(arbiter.restored)
            notify = systemd_notifier()
            lifecycle = Lifecycle(
                engine.view, instruments.publish, progress_deadline_s=settings.progress_deadline, notify=notify
            )
            kitchen = self._kitchen(engine, arbiter, lifecycle, instruments, keys)
            admin_keys = Keys.load(settings.admin_key_file, settings.admin_key)
            open_metrics = Access(admin_keys if settings.metrics_private else Keys(()))
            health = Health(lifecycle, self._version, instruments.render, open_metrics.check)
            drills = Drills(settings.drill, engine, arbiter.propose, settings.progress_deadline)
            control = self._control(engine, tuning, lifecycle, kitchen, instruments, health, admin_keys, drills)
            instruments.ask_progress(lambda: engine.view().progress_age_ns)
            instruments.ask_sizes(lambda: {**engine.sizes(), **kitchen.sizes()})
            door = FrontDoor(keyless=not keys, host=settings.host, origins=settings.allow_origin)
            app = build_api([*OpenAi(kitchen).routes(), *health.routes()], door, max_body_bytes=settings.max_body)
            rounds = self._rounds(engine, instruments)
            try:
                control.start()
                rounds.start()
                runner = web.AppRunner(app, **RUNNER_OPTIONS)
                await runner.setup()
                for each in sockets:
                    await web.SockSite(runner, each, backlog=BACKLOG).start()
                self._on_listening(self._addresses(sockets, control))
                await self._serve(engine, tuning, lifecycle, kitchen, instruments, notify, arbiter)
                await runner.cleanup()
                await kitchen.empty(_LAST_RECORDS_S)  # of handlers that were cut off just now
            finally:
                await drills.close()
                rounds.stop()
                control.stop()
        return 0

    async def _serve(
        self,
        engine: Engine,
        tuning: Tuning,
        lifecycle: Lifecycle,
        kitchen: Kitchen,
        instruments: Instruments,
        notify: Callable[[str], None],
        arbiter: LimitsArbiter,
    ) -> None:
        """From the engine's start to the last answer."""
        chores = [
            asyncio.create_task(_every(_OBSERVE_S, lifecycle.observe)),
            asyncio.create_task(lag.watch("api", instruments.publish)),
            asyncio.create_task(self._reloads(engine, arbiter)),
            asyncio.create_task(_every(_WEIGH_S, instruments.weigh)),
            asyncio.create_task(tuning.run()),
        ]
        interval_s = watchdog_interval_s()
        if interval_s is not None:
            chores.append(asyncio.create_task(_every(interval_s, lambda: notify("WATCHDOG=1"))))
        lifecycle.observe()
        try:
            await engine.start()
            if await self._becomes_ready(engine):
                lifecycle.observe()
                await self._stop.wait()
            lifecycle.stopping()
            log.info("draining: %d requests run, the grace is %.0f s", len(kitchen.live), self._settings.grace)
            await engine.drain(self._settings.grace)
            await kitchen.empty(_LAST_ANSWERS_S)
            lifecycle.stopped()
        finally:
            await engine.drain(0.0)
            for chore in chores:
                chore.cancel()
            tuning.close()

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

    async def _reloads(self, engine: Engine, arbiter: LimitsArbiter) -> None:
        """Read the settings again after each SIGHUP."""
        reload = Reload(self._loaded, self._read, engine.view, arbiter.propose)
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

    def _kitchen(
        self, engine: Engine, arbiter: LimitsArbiter, lifecycle: Lifecycle, instruments: Instruments, keys: Keys
    ) -> Kitchen:
        settings = self._settings

        def rows() -> int:
            limits = engine.view().limits
            return limits.max_num_seqs if limits else _START_UP_ROWS

        return Kitchen(
            port=engine,
            text=self._model.text,
            served=Served(
                names=settings.served_model_name or (self._model.name,),
                eos_token_ids=self._model.eos_token_ids,
                created=int(time.time()),
            ),
            queue=Queue(settings.max_queued_requests, settings.max_queued_tokens, rows),
            publish=instruments.publish,
            authorize=Access(keys).check,
            gate=lifecycle.gate,
            sampled=instruments.sampled,
            why_context=lambda: arbiter.reasons.get("context_limit", {}).get("why", ""),
            request_timeout_s=settings.request_timeout,
            sampler=RequestSampler(instruments.publish, settings.sample_requests) if settings.sample_requests else None,
            mix=TokenMixer(instruments.publish, install_salt(self._state_dir / "salt")),
        )

    def _tuning(self, engine: Engine, arbiter: LimitsArbiter, instruments: Instruments, model: str) -> Tuning:
        def look(seconds: int) -> snapshot.Snapshot:
            views = replace(instruments.views(engine.view(), {}), latency_seconds=seconds, whole=True)
            return snapshot.build(instruments.fold, TUNING_PARTS, views)

        return Tuning(
            engine, arbiter, look, instruments.publish, self._settings,
            directory=self._state_dir, model=model, version=self._version,
        )  # fmt: skip

    def _rounds(self, engine: Engine, instruments: Instruments) -> Rounds:
        config = self._loaded.public()
        return Rounds(
            lambda: snapshot.build(instruments.fold, ROUNDS_PARTS, instruments.views(engine.view(), config)),
            instruments.publish,
            instruments.history,
            instruments.past,
            state_dir=self._state_dir,
            settings=config,
        )

    def _control(
        self,
        engine: Engine,
        tuning: Tuning,
        lifecycle: Lifecycle,
        kitchen: Kitchen,
        instruments: Instruments,
        health: Health,
        admin_keys: Keys,
        drills: Drills,
    ) -> ControlThread:
        settings = self._settings
        config = self._loaded.public()
        desk = Desk(
            loop=asyncio.get_running_loop(),
            port=engine,
            doer=_Doer(lifecycle, kitchen, tuning),
            drill=drills.start if drills.names else None,
            fold=instruments.fold,
            feed=instruments.feed,
            config=config,
            views=lambda: instruments.views(engine.view(), config),
            record=instruments.record,
            bundles=instruments.bundles,
            tracing=instruments,
        )
        return ControlThread(
            self._runtime_dir,
            [*health.routes(), *Control(desk, lambda _: None).routes()],
            None if settings.admin_port is None else (settings.admin_host, settings.admin_port),
            [*health.routes(), *Control(desk, AdminAccess(admin_keys).check).routes()],
            lambda: lag.watch("control", instruments.publish),
        )

    def _addresses(self, sockets: list[socket.socket], control: ControlThread) -> Addresses:
        settings = self._settings
        admin = f"http://{_netloc(settings.admin_host)}:{control.admin_port}" if control.admin_port else None
        port = sockets[0].getsockname()[1]
        return Addresses(api=f"http://{_netloc(settings.host)}:{port}", admin=admin, control=control.path)


@dataclass(frozen=True, slots=True)
class _Doer:
    """daemon.api.control.Doer."""

    lifecycle: Lifecycle
    kitchen: Kitchen
    tuning: Tuning

    def drain(self) -> None:
        self.lifecycle.drain("asked for over the control API")

    def resume(self) -> None:
        self.lifecycle.resume()

    def abort(self, request_id: str) -> int:
        return self.kitchen.abort(request_id)

    async def steer(self, order: TunerOrder) -> dict[str, Any]:
        return await self.tuning.act(order)

    def tuner_status(self) -> dict[str, Any]:
        return self.tuning.status()


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
