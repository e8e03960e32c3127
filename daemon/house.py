"""House: every room of one daemon, composed. It says who knows of whom; nothing runs yet, and nothing is decided here.

It owns no lifetime (serving.py) and no flag. Enter at `House`.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from autotune.watch import PARTS as TUNING_PARTS
from daemon.admission import FrontDoor, Keys, Queue
from daemon.api.access import Access, AdminAccess
from daemon.api.control import Control, Desk
from daemon.api.health import Health
from daemon.api.kitchen import Kitchen, Served
from daemon.api.openai import OpenAi
from daemon.api.textport import TextPort
from daemon.app import build_api
from daemon.control_thread import ControlThread
from daemon.drills import Drills
from daemon.instruments import Instruments
from daemon.lifecycle import Lifecycle
from daemon.limits import LimitsArbiter
from daemon.port import EnginePort, EngineView
from daemon.rounds import PARTS as ROUNDS_PARTS
from daemon.rounds import Rounds
from daemon.settings import Loaded
from daemon.tuning import TunerOrder, Tuning
from engine.budget import Limits, Resolved
from telemetry import lag, snapshot
from telemetry.redact import RequestSampler
from telemetry.tokenmix import TokenMixer, install_salt

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
class Site:
    """Where a daemon lives, and which version it is."""

    runtime_dir: Path
    state_dir: Path
    version: str


class House:
    """To be made in the loop that will serve. `notify` is systemd's."""

    def __init__(
        self,
        loaded: Loaded,
        model: Model,
        site: Site,
        engine: Engine,
        instruments: Instruments,
        keys: Keys,
        notify: Callable[[str], None],
    ) -> None:
        settings = loaded.settings
        self._settings, self._public = settings, loaded.public()
        self._site, self._text, self._eos_token_ids = site, model.text, model.eos_token_ids
        self._names = settings.served_model_name or (model.name,)
        self.engine, self.instruments, self.notify = engine, instruments, notify
        self.arbiter = LimitsArbiter(engine, instruments.publish)
        self.tuning = self._tuning()
        self.arbiter.begin_with(self.tuning.begin)
        engine.on_limits(self.arbiter.restored)
        self.lifecycle = Lifecycle(
            engine.view, instruments.publish, progress_deadline_s=settings.progress_deadline, notify=notify
        )
        self.kitchen = self._kitchen(Access(keys))
        self.drills = Drills(settings.drill, engine, self.arbiter.propose, settings.progress_deadline)
        admin_keys = Keys.load(settings.admin_key_file, settings.admin_key)
        open_metrics = Access(admin_keys if settings.metrics_private else Keys(()))
        health = Health(self.lifecycle, site.version, instruments.render, open_metrics.check)
        self.control = self._control(health, AdminAccess(admin_keys))
        door = FrontDoor(keyless=not keys, host=settings.host, origins=settings.allow_origin)
        routes = [*OpenAi(self.kitchen).routes(), *health.routes()]
        self.api: web.Application = build_api(routes, door, max_body_bytes=settings.max_body)
        self.rounds = self._rounds()
        instruments.ask_progress(lambda: engine.view().progress_age_ns)
        instruments.ask_sizes(lambda: {**engine.sizes(), **self.kitchen.sizes()})

    def _tuning(self) -> Tuning:
        engine, instruments = self.engine, self.instruments

        def look(seconds: int) -> snapshot.Snapshot:
            views = replace(instruments.views(engine.view(), {}), latency_seconds=seconds, whole=True)
            return snapshot.build(instruments.fold, TUNING_PARTS, views)

        return Tuning(
            engine, self.arbiter, look, instruments.publish, self._settings,
            directory=self._site.state_dir, model=self._names[0], version=self._site.version,
        )  # fmt: skip

    def _kitchen(self, access: Access) -> Kitchen:
        settings, engine, instruments = self._settings, self.engine, self.instruments

        def rows() -> int:
            limits = engine.view().limits
            return limits.max_num_seqs if limits else _START_UP_ROWS

        return Kitchen(
            port=engine,
            text=self._text,
            served=Served(
                names=self._names,
                eos_token_ids=self._eos_token_ids,
                created=int(time.time()),
            ),
            queue=Queue(settings.max_queued_requests, settings.max_queued_tokens, rows),
            publish=instruments.publish,
            authorize=access.check,
            gate=self.lifecycle.gate,
            sampled=instruments.sampled,
            why_context=lambda: self.arbiter.reasons.get("context_limit", {}).get("why", ""),
            holds=settings.context_policy == "queue",
            request_timeout_s=settings.request_timeout,
            sampler=RequestSampler(instruments.publish, settings.sample_requests) if settings.sample_requests else None,
            mix=TokenMixer(instruments.publish, install_salt(self._site.state_dir / "salt")),
        )

    def _rounds(self) -> Rounds:
        instruments, view = self.instruments, self.engine.view
        return Rounds(
            lambda: snapshot.build(instruments.fold, ROUNDS_PARTS, instruments.views(view(), self._public)),
            instruments.publish,
            instruments.history,
            instruments.past,
            state_dir=self._site.state_dir,
            settings=self._public,
        )

    def _control(self, health: Health, admin: AdminAccess) -> ControlThread:
        settings, instruments, view = self._settings, self.instruments, self.engine.view
        desk = Desk(
            loop=asyncio.get_running_loop(),
            port=self.engine,
            doer=_Doer(self.lifecycle, self.kitchen, self.tuning),
            drill=self.drills.start if self.drills.names else None,
            fold=instruments.fold,
            feed=instruments.feed,
            config=self._public,
            views=lambda: instruments.views(view(), self._public),
            record=instruments.record,
            bundles=instruments.bundles,
            tracing=instruments,
        )
        return ControlThread(
            self._site.runtime_dir,
            [*health.routes(), *Control(desk, lambda _: None).routes()],
            None if settings.admin_port is None else (settings.admin_host, settings.admin_port),
            [*health.routes(), *Control(desk, admin.check).routes()],
            lambda: lag.watch("control", instruments.publish),
        )


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
