"""EngineSession: the daemon's engine: starts the process, routes its outputs, survives it, starts it again.

The first implementation of daemon.port.EnginePort. It owns one engine life after another: state, streams, back-off. The
pipes and sockets of one life are daemon/engine_life.py's, the streams daemon/streams.py's. It must not know HTTP,
text or torch. Enter at `EngineSession.start`, then `wait_ready`; after that it is an EnginePort.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from daemon import casualty
from daemon.engine_life import Death, EngineLife, sweep
from daemon.port import EngineView, OutputStream
from daemon.streams import Stream, StreamTable
from daemon.watchdog import PERIOD_S, Watchdog
from engine import wire
from engine.budget import Limits, Resolved
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineFault, InferdError
from engine.request import Request
from telemetry.events import EngineEnded, EngineStarted, EngineStatus, Event, Incident, LimitsView, StepReport

log = logging.getLogger("inferd.session")

_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_S = 60.0  # a life this long forgives the failures before it
_EARLY_FAILURES = 3  # lives that may end before the very first Ready
_ENDING_S = 2.0  # for an engine that was told to end
_ACK_DELAY_S = 0.01
_HOPELESS = (2, 3, 4)  # exit codes of a first start that a second cannot change: configuration, model, memory plan


class EngineSession:
    """Used from one event loop, except `view`, which any thread may call. `publish` is the daemon's bus; `argv`
    replaces the engine's command (tests)."""

    def __init__(
        self,
        config: EngineConfig,
        runtime_dir: Path,
        publish: Callable[[Event], None],
        *,
        argv: Sequence[str] | None = None,
        env: dict[str, str] | None = None,
        backoff_s: Sequence[float] = _BACKOFF_S,
        progress_deadline_s: float = 60.0,
    ) -> None:
        self._config = config
        self._runtime_dir = runtime_dir
        self._publish = publish
        self._argv = argv
        self._env = env
        self._backoff_s = tuple(backoff_s)
        self._view = EngineView(state="starting")
        self._status: EngineStatus | None = None  # last heartbeat; replaced by the telemetry thread
        self._progress_ns = 0  # last sign of life; written by the telemetry thread
        self._choose_limits: Callable[[Resolved, Limits], Limits] = lambda _, limits: limits
        self._life: EngineLife | None = None
        self._streams = StreamTable(self._acknowledge, self._cancel)
        self._taken: dict[str, int] = {}  # acknowledgements not sent yet
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._limits_set: deque[asyncio.Future[wire.LimitsSet]] = deque()
        self._tokens = itertools.count(1)
        self._settled: asyncio.Future[InferdError | None] | None = None  # the first Ready, or why there will be none
        self._watchdog = Watchdog(progress_deadline_s, publish, lambda: self._streams.ids())
        self._supervisor: asyncio.Task[None] | None = None
        self._stopping = False

    # -- life cycle

    async def start(self) -> None:
        """Begin to start the engine; returns at once."""
        sweep(self._runtime_dir)
        self._settled = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        self._supervisor.add_done_callback(self._on_supervisor_done)

    async def wait_ready(self) -> EngineView:
        """Until the engine is ready for the first time. Raises the InferdError that makes it hopeless."""
        if self._settled is None:
            raise EngineFault("the engine session was not started")
        error = await asyncio.shield(self._settled)
        if error is not None:
            raise error
        return self.view()

    def on_limits(self, choose: Callable[[Resolved, Limits], Limits]) -> None:
        """`choose(resolved, limits)` decides the limits of every engine that becomes ready."""
        self._choose_limits = choose

    async def drain(self, grace_s: float) -> None:
        """Finish what runs within `grace_s`, then abort the rest and end the engine. Never takes longer than
        `grace_s` plus a few seconds, whatever the engine does."""
        self._stopping = True
        life, ready = self._life, self._view.state == "ready"
        if self._view.state not in ("failed", "stopped"):
            self._set(state="draining", why="told to drain")
        if life is not None:
            if ready and life.send(wire.Drain()) and not await life.ended_within(grace_s):
                if len(self._streams):
                    log.warning("the grace of %.1f s is over: %d choices are cut off", grace_s, len(self._streams))
                life.send(wire.Shutdown())
                await life.ended_within(_ENDING_S)
            life.kill()
        if self._supervisor is not None:
            if life is None:
                self._supervisor.cancel()  # between two lives: nothing to wait for
            await asyncio.wait([self._supervisor], timeout=_ENDING_S)
        self._end_streams("the engine was drained")
        self._settle(EngineFault("the engine was drained before it was ready"))
        self._set(state="stopped", why="drained", pid=None)

    # -- EnginePort

    def view(self) -> EngineView:
        """What is known now. Safe from any thread."""
        view, status, life = self._view, self._status, self._life
        if view.state not in ("ready", "draining") or status is None or life is None:
            return replace(view, process_pid=self.engine_pid)
        return replace(
            view,
            progress_age_ns=max(0, time.monotonic_ns() - max(self._progress_ns, life.beat().at_ns)),
            running=status.running,
            waiting=status.waiting,
        )

    @property
    def engine_pid(self) -> int | None:
        """The process of now, also while it loads (`view` has a pid only when it is ready)."""
        return self._life.pid if self._life is not None else None

    def sizes(self) -> dict[str, int]:
        """Every map and queue here that can grow."""
        return {
            "session_streams": len(self._streams),
            "session_acks": len(self._taken),
            "session_answers": len(self._answers) + len(self._limits_set),
        }

    def submit(self, requests: Sequence[Request]) -> list[OutputStream]:
        """Hand over choices. Raises EngineFault if the engine is not ready."""
        life, view = self._life, self._view
        if life is None or view.state != "ready":
            raise EngineFault(f"the engine is {view.state}", view.why)
        now_ns = time.monotonic_ns()
        stamped = [request if request.sent_ns else replace(request, sent_ns=now_ns) for request in requests]
        streams: list[OutputStream] = [self._streams.open(request.id, now_ns) for request in stamped]
        if not life.send(wire.Submit(requests=stamped)):
            log.warning("the engine is gone: %d choices end at once", len(streams))
            self._end_streams("the engine died before the request reached it")
        return streams

    async def set_limits(self, limits: Limits) -> Limits:
        """Raises ConfigError if the engine refuses them, EngineFault if there is no engine."""
        life = self._life
        if life is None or self._view.state != "ready":
            raise EngineFault(f"the engine is {self._view.state}", self._view.why)
        done: asyncio.Future[wire.LimitsSet] = asyncio.get_running_loop().create_future()
        self._limits_set.append(done)
        life.send(wire.SetLimits(limits=limits))
        answer = await done
        if answer.refused:
            raise ConfigError(answer.refused)
        return answer.limits

    async def ask(self, part: str, timeout_s: float = 1.0) -> Any | None:
        return await self._query(lambda token: wire.Ask(token=token, part=part), timeout_s)

    async def act(self, action: str, timeout_s: float = 5.0) -> Any | None:
        return await self._query(lambda token: wire.Act(token=token, action=action), timeout_s)

    async def _query(self, make: Callable[[int], wire.Command], timeout_s: float) -> Any | None:
        life = self._life
        if life is None or self._view.state not in ("ready", "draining"):
            return None
        token = next(self._tokens)
        answer = self._answers[token] = asyncio.get_running_loop().create_future()
        try:
            life.send(make(token))
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return None
        finally:
            del self._answers[token]

    # -- one life after another

    async def _supervise(self) -> None:
        failures, restarts = 0, 0
        while True:
            begun = time.monotonic()
            death = await self._live(restarts)
            if self._stopping:
                return None
            # Once one has served, the next may too: what it lacks (a file, memory) may come back.
            never_ready = self._settled is not None and not self._settled.done()
            if never_ready and (death.exit_code in _HOPELESS or failures + 1 >= _EARLY_FAILURES):
                return self._fail(death.error())
            failures = 1 if time.monotonic() - begun > _STEADY_S else failures + 1
            restarts += 1
            pause_s = self._backoff_s[min(failures, len(self._backoff_s)) - 1]
            self._set(state="restarting", restarts=restarts, why=f"{death.detail}; again in {pause_s:.1f} s")
            await asyncio.sleep(pause_s)

    async def _live(self, restarts: int) -> Death:
        """One engine, from exec to the end of its process. Never raises for what the engine does."""
        life = self._life = EngineLife(self._config, self._runtime_dir, self._on_reply, self._on_events)
        self._set(
            state="restarting" if restarts else "starting",
            why="the engine is loading",
            engine_id=life.engine_id,
            restarts=restarts,
            pid=None,
            limits=None,
        )
        watching = asyncio.create_task(self._watch(), name="engine-watchdog")
        try:
            death = await life.run(self._argv, self._env)
        finally:
            watching.cancel()
            self._life = None
            self._status = None
        if self._stopping and (death.orderly or self._view.pid is None):  # told to end, perhaps while it was loading
            death = replace(death, cause="drained")
        served = self._view.pid is not None
        victims = self._end_streams(f"the engine ended: {death.detail}")
        if self._view.state != "draining":
            self._set(state="restarting", why=death.detail, pid=None)
        at_ns = time.monotonic_ns()
        incident = casualty.of(death, life.engine_id, served=served, victims=victims, at_ns=at_ns)
        if incident is not None and not self._stopping:
            self._publish(incident)
        self._publish(
            EngineEnded(
                at_ns=at_ns,
                engine_id=life.engine_id,
                cause=death.cause,
                detail=death.detail,
                exit_code=death.exit_code,
                victims=victims,
            )
        )
        return death

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            life = self._life if self._view.state == "ready" else None
            due = self._watchdog.look(life)
            if life is not None and due == "report":
                await asyncio.to_thread(self._watchdog.report, life)
            elif life is not None and due == "end":
                life.kill("wedged")

    def _fail(self, error: InferdError) -> None:
        self._set(state="failed", why=str(error), pid=None)
        self._settle(error)

    def _settle(self, error: InferdError | None) -> None:
        """Let `wait_ready` return, or raise; only the first time counts."""
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(error)

    def _on_supervisor_done(self, supervisor: asyncio.Task[None]) -> None:
        """A supervisor that raises has found no engine and no way to start one: e.g. no room for a socket."""
        error = None if supervisor.cancelled() else supervisor.exception()
        if error is not None:
            log.error("the engine is given up", exc_info=error)
            self._end_streams(f"the engine is given up: {error}")
            self._fail(EngineFault(f"the engine cannot be started: {error}"))

    def _set(self, **changes: Any) -> None:
        self._view = replace(self._view, **changes)

    def _end_streams(self, why: str) -> tuple[str, ...]:
        """Everybody who waits for this engine gets an answer. Returns the ids of the choices that were cut off."""
        self._taken.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(None)
        while self._limits_set:
            waiting = self._limits_set.popleft()
            if not waiting.done():
                waiting.set_exception(EngineFault(why))
        return self._streams.end_all(why, time.monotonic_ns())

    # -- what the engine says

    def _on_reply(self, reply: wire.Reply) -> None:
        match reply:
            case wire.Outputs(outputs):
                self._streams.deliver(outputs)
            case wire.Ready():
                self._on_ready(reply)
            case wire.LimitsSet():
                self._on_limits_set(reply)
            case wire.Answer(token, value):
                answer = self._answers.get(token)
                if answer is not None and not answer.done():
                    answer.set_result(value)

    def _on_ready(self, ready: wire.Ready) -> None:
        life = self._life
        if life is None or self._stopping:
            return
        limits = self._choose_limits(ready.resolved, ready.limits)
        if limits != ready.limits:
            life.send(wire.SetLimits(limits=limits))
            self._limits_set.append(asyncio.get_running_loop().create_future())
        self._progress_ns = time.monotonic_ns()
        self._set(
            state="ready", why="", pid=ready.pid, resolved=ready.resolved, limits=limits, phases=dict(ready.phases)
        )
        resolved = asdict(ready.resolved)
        reasons = resolved.pop("reasons")
        self._publish(
            EngineStarted(
                at_ns=time.monotonic_ns(),
                engine_id=life.engine_id,
                pid=ready.pid,
                restarts=self._view.restarts,
                phases=dict(ready.phases),
                resolved=resolved,
                reasons=reasons,
                limits=LimitsView(**asdict(limits)),
            )
        )
        self._settle(None)

    def _on_limits_set(self, answer: wire.LimitsSet) -> None:
        self._set(limits=answer.limits)
        if self._limits_set:
            waiting = self._limits_set.popleft()
            if not waiting.done():
                waiting.set_result(answer)

    def _on_events(self, events: Sequence[Event]) -> None:
        """In the telemetry thread."""
        for event in events:
            if isinstance(event, StepReport):
                self._progress_ns = event.at_ns
                self._streams.admitted(event)
            elif isinstance(event, EngineStatus):
                self._status = event
                self._progress_ns = max(self._progress_ns, event.progress_ns)
            self._publish(self._signed(event))

    def _signed(self, event: Event) -> Event:
        """An engine does not know its own id: an incident is told it here."""
        life = self._life
        if isinstance(event, Incident) and life is not None:
            return msgspec.structs.replace(event, engine_id=life.engine_id)
        return event

    # -- what the streams say

    def _acknowledge(self, request_id: str, tokens: int) -> None:
        if not self._taken:
            asyncio.get_running_loop().call_later(_ACK_DELAY_S, self._send_acks)
        self._taken[request_id] = self._taken.get(request_id, 0) + tokens

    def _send_acks(self) -> None:
        taken, self._taken = self._taken, {}
        if taken and self._life is not None:
            self._life.send(wire.Ack(taken=taken))

    def _cancel(self, stream: Stream, reason: str) -> None:
        if self._life is not None:
            self._life.send(wire.Cancel(request_ids=[stream.request_id], reason=reason))
