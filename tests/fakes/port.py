"""ScriptedPort: a daemon.port.EnginePort without an engine: scripted tokens, pace, failures; real streams, real credit.

It behaves like an engine as far as the daemon can tell: rows and a queue, one batch of outputs a step, the partition of
times in the last Output. Tests say what each request answers by a `script`, hold its steps by `pause`, end it by `die`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from daemon.port import EngineView, OutputStream
from daemon.streams import Stream, StreamTable
from engine.budget import Limits, Resolved
from engine.errors import EngineFault
from engine.output import Output
from engine.request import EngineFacts, FinishReason, Request, TokenLogprob
from tests.fakes.text import EOS


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What one choice answers. It ends after `tokens` with EOS (or earlier by max_tokens)."""

    tokens: Sequence[int] = tuple(b"hello world")
    burst: int = 1  # tokens a step
    hang_after: int | None = None  # produces no more than so many tokens, then waits to be cancelled
    error_code: str = ""  # ends with this error after `tokens`
    finish: FinishReason | None = None  # instead of EOS


def saying(text: str, **how: Any) -> Callable[[Request], Script]:
    """Every choice answers `text`."""
    return lambda _: Script(tokens=tuple(text.encode()), **how)


@dataclass(slots=True)
class _Row:
    request: Request
    script: Script
    received_ns: int
    credit: int
    scheduled_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    given: int = 0
    cancelled: str = ""


@dataclass(slots=True)
class _Seen:
    """What tests look at afterwards."""

    requests: list[Request] = field(default_factory=list)
    cancelled: list[tuple[str, str]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


class ScriptedPort:
    """Use inside a running loop: `async with ScriptedPort(saying("hi")) as port`."""

    def __init__(
        self,
        script: Callable[[Request], Script] = lambda _: Script(),
        *,
        rows: int = 256,
        step_s: float = 0.0,
        credit: int = 256,
        context: int = 4096,
    ) -> None:
        self._script = script
        self._step_s = step_s
        self._credit = credit
        self._rows: dict[str, _Row] = {}
        self._waiting: deque[_Row] = deque()
        self._table = StreamTable(self._acknowledge, self._cancel)
        self._work = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._task: asyncio.Task[None] | None = None
        self.seen = _Seen()
        resolved = Resolved(
            device="cpu",
            dtype="float32",
            kv_dtype="float32",
            threads=1,
            block_size=16,
            rows=rows,
            step_tokens=2048,
            max_model_len=context,
            kv_blocks=4096,
            memory_limit_bytes=1 << 30,
            weights_bytes=1 << 20,
            kv_block_bytes=1 << 10,
            workspace_bytes=0,
            activation_bytes=0,
            runtime_bytes=0,
            reasons={"rows": "scripted"},
        )
        limits = Limits(
            max_num_seqs=rows,
            max_num_batched_tokens=2048,
            prefill_chunk=512,
            max_partial_prefills=2,
            context_limit=context,
            kv_blocks=4096,
        )
        self._view = EngineView(state="ready", engine_id="scripted", pid=1, resolved=resolved, limits=limits)

    async def __aenter__(self) -> "ScriptedPort":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    # -- what tests do

    def pause(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    def state(self, state: str, why: str = "") -> None:
        self._view = replace(self._view, state=state, why=why)

    def age(self, progress_age_ns: int | None) -> None:
        self._view = replace(self._view, progress_age_ns=progress_age_ns)

    def die(self, why: str = "killed (SIGKILL)") -> None:
        self.state("restarting", why)
        self._rows.clear()
        self._waiting.clear()
        self._table.end_all(f"the engine ended: {why}", time.monotonic_ns())

    @property
    def live(self) -> int:
        """Choices that have not ended."""
        return len(self._table)

    @property
    def running(self) -> int:
        return len(self._rows)

    # -- EnginePort

    def view(self) -> EngineView:
        return replace(self._view, running=len(self._rows), waiting=len(self._waiting))

    def submit(self, requests: Sequence[Request]) -> list[OutputStream]:
        if self._view.state != "ready":
            raise EngineFault(f"the engine is {self._view.state}", self._view.why)
        now_ns = time.monotonic_ns()
        streams: list[OutputStream] = []
        for request in requests:
            self.seen.requests.append(request)
            self._waiting.append(_Row(request, self._script(request), now_ns, self._credit))
            streams.append(self._table.open(request.id, now_ns))
        self._work.set()
        return streams

    async def set_limits(self, limits: Limits) -> Limits:
        self._view = replace(self._view, limits=limits)
        return limits

    async def ask(self, part: str, timeout_s: float = 1.0) -> Any | None:
        return {"part": part}

    async def act(self, action: str, timeout_s: float = 5.0) -> Any | None:
        return {"done": action}

    async def drain(self, grace_s: float) -> None:
        self.state("draining")
        deadline = time.monotonic() + grace_s
        while self.live and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        for row in (*self._rows.values(), *self._waiting):
            row.cancelled = "abort"
        self._open.set()
        self._work.set()
        while self.live:
            await asyncio.sleep(0)
        self.state("stopped")

    # -- the engine that is not there

    def _acknowledge(self, request_id: str, tokens: int) -> None:
        row = self._rows.get(request_id)
        if row is not None:
            row.credit += tokens
            self._work.set()

    def _cancel(self, stream: Stream, reason: str) -> None:
        self.seen.cancelled.append((stream.request_id, reason))
        for row in (*self._rows.values(), *self._waiting):
            if row.request.id == stream.request_id:
                row.cancelled = reason
        self._work.set()

    async def _run(self) -> None:
        due = time.monotonic()
        while True:
            await self._open.wait()
            outputs = self._step()
            if outputs:
                self._table.deliver(outputs)
            elif not (self._rows or self._waiting) or not self._step_s:
                self._work.clear()
                await self._work.wait()
                due = time.monotonic()
            due = max(due + self._step_s, time.monotonic() - 1.0)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def _step(self) -> list[Output]:
        assert self._view.limits is not None
        now_ns = time.monotonic_ns()
        outputs = [self._end(row, FinishReason(row.cancelled), now_ns) for row in self._waiting if row.cancelled]
        self._waiting = deque(row for row in self._waiting if not row.cancelled)
        while self._waiting and len(self._rows) < self._view.limits.max_num_seqs:
            row = self._waiting.popleft()
            row.scheduled_ns = now_ns
            self._rows[row.request.id] = row
        for row in list(self._rows.values()):
            output = self._advance(row, now_ns)
            if output is not None:
                outputs.append(output)
                if output.finish is not None:
                    del self._rows[row.request.id]
        return outputs

    def _advance(self, row: _Row, now_ns: int) -> Output | None:
        if row.cancelled:
            return self._end(row, FinishReason(row.cancelled), now_ns)
        script, sampling = row.script, row.request.sampling
        left = min(len(script.tokens), sampling.max_tokens) - row.given
        count = min(script.burst, left, row.credit)
        if script.hang_after is not None:
            count = min(count, script.hang_after - row.given)
        tokens = tuple(script.tokens[row.given : row.given + count])
        first = row.given == 0
        if tokens:
            row.first_ns = row.first_ns or now_ns
            row.last_ns = now_ns
            row.given += count
            row.credit -= count
        if row.given == sampling.max_tokens or (row.given == len(script.tokens) and script.hang_after is None):
            finish = self._reason(row)
            return self._end(row, finish, now_ns, tokens, first)
        return self._output(row, tokens, first, at_ns=now_ns) if tokens else None

    def _reason(self, row: _Row) -> FinishReason:
        if row.script.error_code:
            return FinishReason.ERROR
        if row.script.finish is not None:
            return row.script.finish
        return FinishReason.LENGTH if row.given == row.request.sampling.max_tokens else FinishReason.STOP

    def _output(self, row: _Row, tokens: tuple[int, ...], first: bool, **rest: Any) -> Output:
        k = row.request.sampling.logprobs
        prompt_k = row.request.sampling.prompt_logprobs
        prompt: tuple[TokenLogprob | None, ...] = ()
        if first and prompt_k is not None:
            prompt = (None, *(_logprob(t, prompt_k) for t in row.request.prompt[1:]))
        return Output(
            request_id=row.request.id,
            tokens=tokens,
            logprobs=() if k is None else tuple(_logprob(t, k) for t in tokens),
            prompt_logprobs=prompt,
            **rest,
        )

    def _end(
        self, row: _Row, finish: FinishReason, now_ns: int, tokens: tuple[int, ...] = (), first: bool = False
    ) -> Output:
        self.seen.ended.append(row.request.id)
        scheduled_ns = row.scheduled_ns or now_ns
        first_ns = row.first_ns or now_ns
        facts = EngineFacts(
            received_ns=row.received_ns,
            emitted_ns=now_ns,
            scheduled_ns=row.scheduled_ns,
            first_token_ns=row.first_ns,
            last_token_ns=row.last_ns,
            queue_ns=scheduled_ns - row.received_ns,
            prefill_ns=first_ns - scheduled_ns,
            decode_ns=now_ns - first_ns,
        )
        return self._output(
            row,
            tokens,
            first,
            at_ns=now_ns,
            finish=finish,
            facts=facts,
            stop_token=EOS if finish is FinishReason.STOP and not row.cancelled else None,
            error_code=row.script.error_code if finish is FinishReason.ERROR else "",
            error="scripted failure" if finish is FinishReason.ERROR else "",
        )


def _logprob(token: int, k: int) -> TokenLogprob:
    top = tuple(((token + i) % 256, -0.5 - i) for i in range(k))
    return TokenLogprob(token, -0.5, 1, top)
