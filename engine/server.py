"""Server: obeys the daemon's commands, steps the engine while there is work, and sleeps in poll when there is none.

Owns what the engine process does between Ready and its end: the order of commands and steps, the answers, the
heartbeat. `Link` is its end of the two sockets. It must not know how the engine was loaded or how the process dies.
Enter at `Server.run`.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Protocol

import msgspec
import zmq

from engine import wire
from engine.books import Accounts
from engine.budget import Limits, Resolved
from engine.errors import ConfigError, EngineFault, InferdError
from engine.loop import Engine
from engine.outbox import Outbox
from engine.output import Output
from engine.request import EngineFacts, FinishReason, Request
from telemetry import probe
from telemetry.events import EngineStatus, Event, LimitsView

_HEARTBEAT_NS = 1_000_000_000
_LINGER_MS = 1000
_MAPPINGS = 32  # of a memory account


class Link:
    """The engine's ends of the two sockets."""

    def __init__(self, commands: str, telemetry: str) -> None:
        self._context = zmq.Context()
        self._commands = self._socket(zmq.PAIR, commands, high_water=0)
        self._telemetry = self._socket(zmq.PUSH, telemetry, high_water=64)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self._telemetry.close(linger=_LINGER_MS // 5)
        self._commands.close(linger=_LINGER_MS)
        self._context.term()

    def _socket(self, kind: int, endpoint: str, high_water: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(high_water)
        socket.connect(endpoint)
        return socket

    def send(self, reply: wire.Reply) -> None:
        """Lossless. Never blocks: the queue is unlimited, and bounded by each request's output credit."""
        self._commands.send(wire.encode(reply))

    def post(self, frame: bytes) -> bool:
        """One telemetry frame, if there is room for it now."""
        try:
            self._telemetry.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def received(self, patience_ms: int) -> Iterator[bytes]:
        """Every frame that is there; waits at most `patience_ms` for the first."""
        if patience_ms and not self._commands.poll(patience_ms):
            return
        while True:
            try:
                yield self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return


class Faults(Protocol):
    """Who can plant faults for drills: engine/device/faults.py."""

    def plant(self, name: str, amount: int, kv_bytes: Callable[[], int]) -> str: ...

    @property
    def planted(self) -> str: ...


class Server:
    """Obeys commands and steps the engine while there is work; sleeps in poll when there is none."""

    def __init__(
        self,
        engine: Engine,
        link: Link,
        outbox: Outbox,
        resolved: Resolved,
        limits: Limits,
        books: Accounts,
        publish: Callable[[Event], None],
        faults: Faults | None = None,
    ) -> None:
        self._faults = faults
        self._engine = engine
        self._link = link
        self._outbox = outbox
        self._ceilings = resolved
        self._limits = limits
        self._books = books
        self._publish = publish
        self._state = "ready"
        self._over = False
        self._bad_commands = 0
        self._next_beat_ns = 0

    def run(self) -> int:
        """Until a Drain is complete or a Shutdown came. Returns the exit code."""
        while not self._over:
            self._beat()
            self._engine.idle()
            for frame in self._link.received(self._patience_ms()):
                self._receive(frame)
            if self._engine.has_work:
                self._step()
            self._outbox.flush(self._engine.progress_ns if self._busy else None)
            if self._state == "draining" and not self._engine.has_work:
                self._over = True
        self._engine.close()
        self._link.send(wire.Ended())
        return 0

    @property
    def _busy(self) -> bool:
        """Whether the next step can do something."""
        return self._engine.has_work and not self._engine.starved

    def _step(self) -> None:
        """The runner's own shortage is the loop's to survive; one in the middle of a plan or a commit is not survived:
        nobody knows how much of it was done."""
        try:
            self._give(self._engine.step())
        except MemoryError:
            why = self._engine.out_of_memory("the scheduler")
            self._outbox.flush(None)
            raise EngineFault(why.message, why.hint) from why

    def _patience_ms(self) -> int:
        """How long nothing can happen unless a command comes."""
        if self._busy:
            return 0
        now_ns = time.monotonic_ns()
        until_ns = self._next_beat_ns
        deadline_ns = self._engine.scheduler.next_deadline_ns
        if deadline_ns:
            until_ns = min(until_ns, deadline_ns)
        return max(1, (until_ns - now_ns) // 1_000_000)

    def _give(self, outputs: list[Output]) -> None:
        if outputs:
            self._link.send(wire.Outputs(outputs=outputs))

    def _receive(self, frame: bytes) -> None:
        """One command. A frame that is none, or one that raises, is said and counted, and the engine goes on."""
        command = None
        try:
            command = wire.decode_command(frame)
            self._obey(command)
        except EngineFault:
            raise
        except MemoryError:
            why = self._engine.out_of_memory("a command")
            print(f"a command was dropped: {why.message}", file=sys.stderr, flush=True)
            command = command or wire.decode_command(frame)  # with what was put by, there may be room to read it
            if isinstance(command, wire.Submit):
                self._refuse(command.requests, why.message, why.code)
        except Exception as error:  # noqa: BLE001 - no command may end the engine under everybody else
            self._bad_commands += 1
            print(f"a command was dropped: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if isinstance(command, wire.Submit):
                self._refuse(command.requests, f"{type(error).__name__}: {error}")

    def _refuse(self, requests: list[Request], why: str, code: str = InferdError.code) -> None:
        """End choices whose submission failed: those that got in, and those that the engine never knew."""
        ended = self._engine.cancel([request.id for request in requests], FinishReason.ERROR)
        now_ns = time.monotonic_ns()
        known = {output.request_id for output in ended}
        unknown = [
            Output(
                request_id=request.id,
                finish=FinishReason.ERROR,
                error_code=code,
                error=why,
                facts=EngineFacts(received_ns=now_ns, emitted_ns=now_ns),
                at_ns=now_ns,
            )
            for request in requests
            if request.id not in known
        ]
        self._give([*ended, *unknown])

    def _obey(self, command: wire.Command) -> None:
        match command:
            case wire.Submit(requests):
                self._give(self._engine.submit(requests))
            case wire.Cancel(request_ids, reason):
                self._give(self._engine.cancel(request_ids, FinishReason(reason)))
            case wire.Ack(taken):
                self._engine.ack(taken)
            case wire.SetLimits(limits):
                self._set_limits(limits)
            case wire.Ask(token, part):
                self._link.send(wire.Answer(token=token, value=self._part(part)))
            case wire.Act(token, action):
                self._link.send(wire.Answer(token=token, value=self._act(action)))
            case wire.Drain():
                self._state = "draining"
            case wire.Shutdown():
                self._give(self._engine.abort_all())
                self._over = True

    def _set_limits(self, limits: Limits) -> None:
        refused = ""
        try:
            self._engine.set_limits(limits.within(self._ceilings))
            self._limits = limits
        except ConfigError as error:
            refused = str(error)
        self._link.send(wire.LimitsSet(limits=self._limits, refused=refused))

    def _part(self, part: str) -> object:
        """Plain data, or None for a part that this engine does not report."""
        match part:
            case "requests":
                # under the names of telemetry's RequestView
                views = self._engine.scheduler.views()
                return [{**msgspec.to_builtins(view), "blocks": view.kv_blocks} for view in views]
            case "blocks":
                return self._engine.scheduler.block_map()
            case "sizes":
                return self._sizes()
            case "planted":
                return self._faults.planted if self._faults is not None else None
            case "memory":
                return {
                    "mappings": probe.largest_mappings(_MAPPINGS),
                    "segments": probe.cuda_segments(_MAPPINGS),
                }
        return None

    def _act(self, action: str) -> object:
        """'reset_cache', or 'plant NAME AMOUNT' where faults can be planted; None for what is neither."""
        if action == "reset_cache":
            return {"blocks": self._engine.scheduler.reset_cache()}
        if action.startswith("plant ") and self._faults is not None:
            _, name, amount = action.split()
            return {"planted": self._faults.plant(name, int(amount), self._kv_bytes)}
        return None

    def _kv_bytes(self) -> int:
        return self._engine.scheduler.state_facts().kv_active * self._ceilings.kv_block_bytes

    def _sizes(self) -> dict[str, int]:
        return {**self._engine.sizes(), "outbox": len(self._outbox), "bad_commands": self._bad_commands}

    def _beat(self) -> None:
        """EngineStatus and what memory is used for, once a second, also when idle. It doubles as the sign of life."""
        now_ns = time.monotonic_ns()
        if now_ns < self._next_beat_ns:
            return
        self._next_beat_ns = now_ns + _HEARTBEAT_NS
        if not self._engine.has_work:
            self._engine.progress_ns = now_ns
        facts = self._engine.scheduler.state_facts()
        self._outbox.put(
            EngineStatus(
                at_ns=now_ns,
                state=self._state,
                progress_ns=self._engine.progress_ns,
                steps=self._engine.steps,
                limits=LimitsView(**asdict(self._limits)),
                sizes=self._sizes(),
                cpu_ns=time.process_time_ns(),
                rss_bytes=probe.resident_bytes() or 0,
                running=facts.running,
                waiting=facts.waiting,
                kv_active=facts.kv_active,
                kv_cached=facts.kv_cached,
                kv_free=facts.kv_free,
                telemetry_dropped=self._outbox.dropped,
                step_cost=self._engine.step_cost(),
                block_ages_ms=self._engine.scheduler.block_ages(),
            )
        )
        report = self._books.report(now_ns)
        if report is not None:
            self._publish(report)
        self._outbox.flush()
