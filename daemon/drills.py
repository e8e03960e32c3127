"""Fault drills: real faults on demand, and for each what it must raise: instruments are to be tried before the night.

Owns the table and who carries each drill out: the engine (a fault planted in its device plane by
engine/device/faults.py), or this daemon. None is to be had unless `--drill` names it; then a POST to
/inferd/v1/drill/NAME starts it. What explains the fault afterwards is told nothing of this: it sees what any fault
shows. Enter at `Drills.start`.
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from daemon.port import EnginePort, OutputStream
from engine.errors import ConfigError, EngineFault
from engine.kv.layout import blocks_for
from engine.request import Request, SamplingParams

log = logging.getLogger("inferd.drills")

_SHORT_TOKENS = 16
_ECHO_TOKENS = 8  # at first
_LONG_TOKENS = 512
_LONGS = 16
_PATIENCE_S = 5.0
_UNREAD_TOKENS = 256  # engine.config: output_credit
_LEARNING_LOOKS = 600
Propose = Callable[[dict[str, int], str, str], Awaitable[object]]
_OOM = 'inferd_oom_total{cause="%s"}'
_END = 'inferd_incidents_total{cause="%s"}'
_LOST = 'inferd_telemetry_dropped_total{sink="%s"}'
_GROWING = """
import sys, time
sys.stdin.readline()
held = []
while len(held) < 256:
    held.append(b"x" * (4 << 20))
    time.sleep(0.02)
time.sleep(60)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """`kind` and `cause` are the incident's (empty: none may be raised). `victims`: whose requests may end by it: none,
    one (the request that needs the memory) or all that run. `runbook` and `section` are where the doctor's first
    finding must lead. `fault` is the engine's; `traffic` are requests of our own that go with it: long, echo (with
    log-probabilities of the prompt), flood (many that are long) or unread (clients that do not read). `limits` are set
    by who wants the alert: in a large pool, a few such clients are no alarm. An alert about repetition fires when the
    drill is repeated."""

    text: str
    kind: str
    cause: str
    metric: str
    alert: str
    runbook: str
    section: str
    victims: str = "none"
    fault: str = ""
    traffic: str = ""
    limits: Mapping[str, int] = field(default_factory=dict)


def _oom(cause: str, text: str, section: str, fault: str, traffic: str = "", victims: str = "none") -> Drill:
    return Drill(
        text=text, kind="oom", cause=cause, metric=_OOM % cause, alert="InferdRepeatedOom",
        runbook="memory_creep" if cause == "leak" else "oom", section=section, victims=victims, fault=fault,
        traffic=traffic,
    )  # fmt: skip


def _end(cause: str, text: str, alert: str, book: str, victims: str = "all", fault: str = "") -> Drill:
    runbook, _, section = book.partition("/")
    return Drill(
        text=text, kind=cause, cause=cause, metric=_END % cause, alert=alert, runbook=runbook, section=section,
        victims=victims, fault=fault,
    )  # fmt: skip


def _quiet(metric: str, text: str, alert: str, book: str, **limits: int) -> Drill:
    runbook, _, section = book.partition("/")
    return Drill(
        text=text, kind="", cause="", metric=metric, alert=alert, runbook=runbook, section=section, limits=limits
    )  # fmt: skip


_STUCK = "wedged_engine/why-was-it-stuck"
_LARGE = "one-step-was-too-large"
DRILLS: Final[Mapping[str, Drill]] = {
    "capacity": _oom("capacity", "a byte cap below what a typical step takes", "too-small", "capacity"),
    "spike": _oom("activation_spike", "a byte cap, and one long prompt", _LARGE, "greedy", "long", "one"),
    "logits": _oom("logits", "a byte cap, and log-probabilities of a prompt", _LARGE, "greedy", "echo", "one"),
    "address_space": _oom(
        "activation_spike", "RLIMIT_AS, and one long prompt", _LARGE, "address_space", "long", "one"
    ),
    "fragmentation": _oom(
        "fragmentation", "a heap in pieces under RLIMIT_AS; restart the engine after it", "fragmentation", "fragments",
        "long",
    ),
    "kv": _oom("kv_exhausted", "a byte cap that the KV cache grows into", "the-kv-cache-took-it", "full_pool", "flood"),
    "neighbour": _oom("neighbour", "another process grows under a shared limit", "neighbours", "neighbour"),
    "leak": _oom("leak", "every step keeps a tensor", "buy-time", "leak"),
    "wedge": _end("wedged", "a step hangs in C, for 1.5 deadlines", "InferdEngineWedged", _STUCK, "none", "stuck"),
    "wedge_for_good": _end(
        "wedged", "a step hangs in C and is not released", "InferdEngineWedged", _STUCK, "all", "stuck"
    ),
    "kill_engine": _end(
        "killed", "SIGKILL to the engine", "InferdEngineRestarted", "crash_loop/killed-from-outside"
    ),
    "kill_both": _end(
        "killed", "SIGKILL to engine and daemon; the next start explains it", "InferdDown", "crash_loop/the-daemon-died"
    ),
    "slow_client": _quiet(
        'inferd_requests{state="preempted"}',
        "clients that do not read: as many as fill the KV cache, if few do; else one",
        "InferdKvPressure", "kv_pressure/clients-that-do-not-read", kv_blocks=160,
    ),
    "full_disk": _quiet(_LOST % "journal", "no file of the daemon may grow", "InferdDiskFull", "disk_full/make-room"),
    "collector_down": _quiet(
        _LOST % "trace", "traces go to a dead address, from the start", "InferdTelemetryDropped", "telemetry_lost/trace"
    ),
}  # fmt: skip
ALL: Final = "all"


def armed(names: tuple[str, ...]) -> tuple[str, ...]:
    """The drills that these settings arm. Raises ConfigError for a name that is none."""
    unknown = sorted(set(names) - set(DRILLS) - {ALL})
    if unknown:
        raise ConfigError(f"no such drill: {', '.join(unknown)}", f"one of {', '.join(DRILLS)}, or {ALL}")
    return tuple(DRILLS) if ALL in names else names


def prepare_environment(names: tuple[str, ...]) -> None:
    """For the drill that has to be there before the first span is made; `all` does not mean it."""
    if "collector_down" in names:
        os.environ.setdefault("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")


class Drills:
    """`port` is the engine's, `propose` changes live limits (source and why come last), `deadline_s` is the progress
    deadline. Used from the API's loop only."""

    def __init__(self, names: tuple[str, ...], port: EnginePort, propose: Propose, deadline_s: float) -> None:
        self._names = armed(names)
        self._port = port
        self._propose = propose
        self._deadline_s = deadline_s
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._neighbour: asyncio.subprocess.Process | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    async def start(self, name: str, amount: int = 0) -> dict[str, Any]:
        """Begin a drill ('none' ends the engine's). Returns what it must raise. Raises ConfigError for one that is not
        armed, EngineFault if the engine does not take it."""
        if name == "none":
            await self._plant("none", 0)
            return {"drill": "none"}
        if name not in self._names:
            raise ConfigError(f"the drill {name!r} is not armed", "start inferd with --drill NAME, or --drill all")
        drill = DRILLS[name]
        log.warning("drill %s: %s", name, drill.text)
        await self.close()  # what is typical is not to be learned from the traffic of the drill before
        if drill.fault:
            await self._fault(name, drill, amount)
        else:
            await self._own(name, amount)
        return {"drill": name, **asdict(drill)}

    async def _fault(self, name: str, drill: Drill, amount: int) -> None:
        if name == "neighbour":
            self._neighbour = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _GROWING, stdin=asyncio.subprocess.PIPE
            )
            amount = self._neighbour.pid
        elif name == "wedge":
            amount = amount or int(1500 * self._deadline_s)
        elif name == "wedge_for_good":
            amount = 3_600_000
        await self._plant(drill.fault, amount)
        if drill.traffic or name == "neighbour":
            self._task(self._go_on(drill.traffic))

    async def _go_on(self, traffic: str) -> None:
        """The rest of a drill, as soon as the fault has seen what is typical: the neighbour grows, or requests of our
        own are sent."""
        for _ in range(_LEARNING_LOOKS):
            planted = await self._port.ask("planted")
            if planted is not None and "learning" not in planted:
                break
            await asyncio.sleep(0.1)
        if not traffic and self._neighbour is not None and self._neighbour.stdin is not None:
            self._neighbour.stdin.write(b"\n")
        if traffic == "echo":
            await self._until_it_is_too_long()
        elif traffic == "long":
            await self._in_one_piece(self._traffic(traffic))
        elif traffic == "flood":
            await self._in_small_pieces(self._traffic(traffic))
        else:
            await asyncio.gather(*map(self._drain, self._traffic(traffic)))

    async def _until_it_is_too_long(self) -> None:
        """Log-probabilities of longer and longer prompts: one at once would be too large in every other way, too."""
        tokens = _ECHO_TOKENS
        while tokens <= _LONG_TOKENS and await self._port.ask("planted"):
            (request,) = self._traffic("echo", tokens)
            await self._drain(request)
            tokens *= 2

    async def _in_one_piece(self, requests: list[Request]) -> None:
        """In chunks, a long prompt's steps are no larger than others: that is what chunks are for."""
        view = self._port.view()
        if view.resolved is not None:
            await self._under("prefill_chunk", view.resolved.step_tokens, requests)

    async def _in_small_pieces(self, requests: list[Request]) -> None:
        """What is missing is to be missing because the cache has grown, not because nobody decoded for a moment and a
        step took a whole prompt."""
        view = self._port.view()
        if view.resolved is not None and view.limits is not None:
            small = min(view.limits.prefill_chunk + view.limits.max_num_seqs, view.resolved.step_tokens)
            await self._under("max_num_batched_tokens", small, requests)

    async def _under(self, knob: str, value: int, requests: list[Request]) -> None:
        """These requests, with one limit changed until all of them have ended."""
        limits = self._port.view().limits
        if limits is None:
            return
        before = getattr(limits, knob)
        await self._propose({knob: value}, "api", "a drill wants steps of this size")
        try:
            await asyncio.gather(*map(self._drain, requests))
        finally:
            with contextlib.suppress(EngineFault):  # it died of it: the next one is told the limits anyway
                await self._propose({knob: before}, "api", "as before")

    async def _plant(self, fault: str, amount: int) -> None:
        if fault == "none":
            await self.close()
        if await self._port.act(f"plant {fault} {amount}") is None:
            raise EngineFault("the engine does not take the fault", "it is not ready, or was started without --drill")

    async def _own(self, name: str, amount: int) -> None:
        """What this process does itself. `amount`: milliseconds, of those that last."""
        pid = self._port.view().pid
        seconds = (amount or 3000) / 1000
        if name in ("kill_engine", "kill_both"):
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            if name == "kill_both":
                os.kill(os.getpid(), signal.SIGKILL)
        elif name == "full_disk":
            self._task(self._full_disk(seconds))
        elif name == "slow_client":
            for request in self._traffic("unread"):
                self._task(self._unread(request, seconds))

    def _traffic(self, kind: str, tokens: int = _LONG_TOKENS) -> list[Request]:
        """With prompts of so many tokens, if the context holds them."""
        limits = self._port.view().limits
        room = limits.context_limit if limits else tokens
        count = _SHORT_TOKENS if kind == "unread" else max(1, min(tokens, room * 3 // 4))
        requests = []
        for _ in range({"": 0, "flood": _LONGS, "unread": self._unread_clients()}.get(kind, 1)):
            self._count += 1
            prompt = tuple(1 + (self._count * 7 + place) % 200 for place in range(count))
            sampling = SamplingParams(max_tokens=8, temperature=0.0)
            if kind in ("flood", "unread"):
                sampling = replace(sampling, max_tokens=64 if kind == "flood" else 100_000)
            if kind == "echo":
                sampling = replace(sampling, prompt_logprobs=5)
            requests.append(Request(id=f"drill-{self._count}", prompt=prompt, sampling=sampling))
        return requests

    def _unread_clients(self) -> int:
        """Each holds its prompt and what it is granted unread: all rows, if three quarters of them fill the cache."""
        view = self._port.view()
        if view.limits is None or view.resolved is None:
            return 1
        fill = view.limits.kv_blocks // blocks_for(_SHORT_TOKENS + _UNREAD_TOKENS, view.resolved.block_size)
        return view.limits.max_num_seqs if 0 < fill <= view.limits.max_num_seqs * 3 // 4 else 1

    async def _drain(self, request: Request) -> None:
        (stream,) = self._port.submit([request])
        try:
            async for _ in stream:
                pass
        except asyncio.CancelledError:
            await self._end(stream)
            raise

    async def _unread(self, request: Request, seconds: float) -> None:
        """A client that takes nothing: what it was granted stays where it is."""
        (stream,) = self._port.submit([request])
        try:
            await asyncio.sleep(seconds)
        finally:
            await self._end(stream)

    async def _end(self, stream: OutputStream) -> None:
        """Returns once the engine has let go of it."""
        stream.cancel()
        async for _ in stream:
            pass

    async def _full_disk(self, seconds: float) -> None:
        """The kernel refuses every file that would grow (EFBIG, where a full disk says ENOSPC)."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            await asyncio.sleep(seconds)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def _task(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a drill's own work failed: %r", error)

    async def _stop_neighbour(self) -> None:
        process, self._neighbour = self._neighbour, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def close(self) -> None:
        """End what lasts. An engine that is stuck is not waited for."""
        await self._stop_neighbour()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_PATIENCE_S)
