"""Generation: one HTTP request for text, from its body to the last byte of the answer and a record for every choice.

Owns the order of things (gate, queue, parse, tokenize, submit, outputs, answer, records) and what happens when it
breaks off: whoever leaves, at whatever stage, has its choices cancelled at once, and their records are written when the
engine has told its part. It must not know routes or how choices are rendered. Enter at `Generation.serve`.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from aiohttp import web

from daemon.admission import Ticket
from daemon.api.body import read_body
from daemon.api.choice import Choice
from daemon.api.errors import ApiError, from_inferd, from_outcome
from daemon.api.kitchen import Kitchen
from daemon.api.merge import Ready, next_output, outputs
from daemon.api.prompt import Prepared, checked, encoded, longest
from daemon.api.record import Stopwatch, Trace, compose, log_ids
from daemon.api.render import DONE, Renderer, Whole, usage_of
from daemon.api.schema import Ask
from daemon.api.sending import taken
from engine.errors import InferdError
from engine.request import FinishReason
from telemetry.events import FirstToken

log = logging.getLogger("inferd.api")

_HELD_LOOK_S = 0.25  # how often one that is held looks whether it still has to be
_SETTLE_S = 10.0  # for the engine's last word on choices whose client has left
_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy must not collect tokens
}


class Generation:
    """One request of `operation` (chat | text_completion); `parse` turns its body into an Ask."""

    def __init__(
        self,
        kitchen: Kitchen,
        operation: str,
        parse: Callable[[bytes], Ask],
        group_id: str,
        arrival_ns: int,
        trace: Trace,
    ) -> None:
        self.group_id = group_id
        self.trace = trace
        self.id = ("chatcmpl-" if operation == "chat" else "cmpl-") + secrets.token_hex(12)
        self.choices: list[Choice] = []
        self.task: asyncio.Task[Any] | None = None  # that serves it
        self.held = False
        self._kitchen = kitchen
        self._operation = operation
        self._parse = parse
        self._watch = Stopwatch(arrival_ns)
        self._log = logging.LoggerAdapter(log, extra=log_ids(group_id, self.trace))
        self._ask: Ask | None = None
        self._aborted = False  # while it was held
        self._prompt_tokens = 0
        self._ticket: Ticket | None = None
        self._response: web.StreamResponse | None = None  # once its headers are out

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer `request`. Raises ApiError if there is something to refuse and nothing was sent yet; its record is
        written by `refused`, once the answer is out."""
        self.task = asyncio.current_task()
        self._kitchen.live[self.id] = self
        try:
            self._kitchen.authorize(request)
            self._kitchen.gate()
            self._ticket = self._kitchen.queue.enter()
            prepared = await self._prepare(request)
            self._submit(prepared)
            answer = self._stream if prepared.ask.stream else self._whole
            return await answer(request, prepared.ask)
        except asyncio.CancelledError:
            self._leave(FinishReason.ABORT, "client_disconnected", 499)
            raise
        except ConnectionResetError:  # noticed by writing; nobody will read what is returned
            self._leave(FinishReason.ABORT, "client_disconnected", 499)
            return self._response or web.Response(status=499)
        except ApiError as error:
            self._cancel()
            if self._response is None:
                raise
            await self._end_with(error)
            self._leave(FinishReason(error.reason), error.code, 200)
            return self._response
        except InferdError as error:
            raise from_inferd(error) from error
        except Exception:
            if self._response is not None:  # else its refusal is still to be written
                self._leave(FinishReason.ERROR, "internal_error", 500)
            raise
        finally:
            del self._kitchen.live[self.id]
            if self._ticket is not None:
                self._ticket.close(served=bool(self.choices) and all(c.done for c in self.choices))

    @property
    def answering(self) -> bool:
        """Part of a stream is out: there is no other answer any more."""
        return self._response is not None

    def refused(self, error: ApiError) -> None:
        """The answer to a request that `serve` refused is out."""
        self._leave(FinishReason(error.reason), error.code, error.status)

    def abort(self) -> int:
        """Stop every choice, as an operator asks; the client gets an error. Returns how many that were; what is held
        counts as one."""
        self._aborted = self.held
        return self._cancel() or int(self.held)

    # -- before the engine

    async def _prepare(self, request: web.Request) -> Prepared:
        kitchen, body = self._kitchen, await read_body(request)
        if kitchen.sampler is not None:
            kitchen.sampler.take(self.group_id, self._operation, body)
        ask = self._ask = self._parse(body)
        kitchen.served.check(ask.model)
        with self._watch.tokenizing():
            prompts = await encoded(ask, kitchen.text)
        if kitchen.holds and kitchen.context().lowered_below(longest(ask, prompts)):
            await self._hold(ask, prompts)
        with self._watch.tokenizing():
            prepared = checked(ask, prompts, kitchen.text, kitchen.served.eos_token_ids, kitchen.context())
        self._prompt_tokens = sum(map(len, prompts))
        return prepared

    async def _hold(self, ask: Ask, prompts: tuple[tuple[int, ...], ...]) -> None:
        """In its place in the queue, until the context limit is raised again or its deadline passes. Raises ApiError
        (429 if the queue is full; 503 once nothing is served any more, or if it is aborted)."""
        kitchen, tokens, deadline_ns = self._kitchen, longest(ask, prompts), self._deadline_ns()
        assert self._ticket is not None
        self._ticket.charge(len(prompts) * ask.n, sum(map(len, prompts)))
        self._log.info("held: %d tokens are too long for the context limit in force", tokens)
        self.held = True
        try:
            while kitchen.context().lowered_below(tokens) and not 0 < deadline_ns <= time.monotonic_ns():
                await asyncio.sleep(_HELD_LOOK_S)
                kitchen.gate()
                if self._aborted:
                    raise from_outcome("abort", "")
        finally:
            self.held = False

    def _deadline_ns(self) -> int:
        """0 = none."""
        timeout_s = self._kitchen.request_timeout_s
        return self._watch.arrival_ns + int(timeout_s * 1e9) if timeout_s else 0

    def _submit(self, prepared: Prepared) -> None:
        kitchen, ask = self._kitchen, prepared.ask
        assert self._ticket is not None
        self._ticket.charge(len(prepared.prompts) * ask.n, self._prompt_tokens)
        kitchen.gate()  # the state may have changed while the body came in
        now_ns = time.monotonic_ns()
        requests = prepared.requests(self.id, self._deadline_ns(), now_ns)
        streams = kitchen.port.submit(requests)
        self._watch.submitted(now_ns)
        self.choices = [
            Choice(request, stream, kitchen.text, ask.stop, prepared.echo_of(i // ask.n))
            for i, (request, stream) in enumerate(zip(requests, streams, strict=True))
        ]

    # -- outputs

    async def _outputs(self) -> AsyncGenerator[Ready]:
        """The choices that have something new, until all are done. Raises the ApiError of one that failed."""
        async with aclosing(outputs(self.choices)) as source:
            async for ready in source:
                for _, choice in ready:
                    if self._kitchen.mix is not None and choice.tokens:
                        self._kitchen.mix.output(choice.tokens)
                    if choice.first_ns and not choice.announced:
                        assert self._ticket is not None
                        self._ticket.started()
                        self._first(choice)
                    if choice.error is not None:
                        raise choice.error
                yield ready

    def _first(self, choice: Choice) -> None:
        """Once for every choice that has a token, whether or not anybody is there to read it."""
        choice.announced = True
        self._kitchen.publish(
            FirstToken(
                at_ns=choice.first_ns,
                request_id=choice.request.id,
                ttft_ns=choice.first_ns - self._watch.arrival_ns,
                trace_id=self.trace.trace_id if self.trace.sampled else "",
            )
        )

    # -- answers

    def _renderer(self, ask: Ask) -> Renderer:
        return Renderer(
            chat=self._operation == "chat",
            response_id=self.id,
            created=int(time.time()),
            model=ask.model,
            text=self._kitchen.text,
            logprobs=ask.logprobs is not None,
            token_ids=ask.token_ids,
        )

    async def _whole(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        wholes = [Whole() for _ in self.choices]
        async with aclosing(self._outputs()) as source:
            async for ready in source:
                for index, choice in ready:
                    wholes[index].add(choice)
        body = self._renderer(ask).whole(wholes, usage_of(self.choices, self._prompt_tokens))
        response = web.Response(body=body, content_type="application/json")
        await self._send(response, request)
        self._finish()
        return response

    async def _send(self, response: web.Response, request: web.Request) -> None:
        """Hand over the whole answer now, so that its last byte can be timed."""
        start_ns = time.monotonic_ns()
        await response.prepare(request)
        await response.write_eof()
        end_ns = time.monotonic_ns()
        for choice in self.choices:
            choice.end_ns = end_ns
            choice.send_ns += end_ns - start_ns

    async def _stream(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        renderer = self._renderer(ask)
        response = web.StreamResponse(headers=_SSE_HEADERS)
        left = len(self.choices)
        async with aclosing(self._outputs()) as source:
            async for ready in source:
                data = b"".join([renderer.chunks(index, choice) for index, choice in ready])
                left -= sum(choice.done for _, choice in ready)
                if not left:
                    if ask.include_usage:
                        data += renderer.usage_chunk(usage_of(self.choices, self._prompt_tokens))
                    data += DONE
                if data:
                    await self._write(response, request, data, ready, last=not left)
        self._finish()
        return response

    async def _write(
        self, response: web.StreamResponse, request: web.Request, data: bytes, ready: Ready, *, last: bool
    ) -> None:
        """One write for all that is there; the `last` one ends the answer. A slow reader holds up this coroutine and
        nobody else: what is not taken from the stream is no credit for the engine. Raises ConnectionResetError for one
        that reads no more."""
        start_ns = time.monotonic_ns()
        async with taken(request):
            if self._response is None:
                await response.prepare(request)
                self._response = response
            await response.write(data)
            if last:
                await response.write_eof()
        end_ns = time.monotonic_ns()
        for _, choice in ready:
            choice.send_ns += end_ns - start_ns
            choice.end_ns = end_ns

    async def _end_with(self, error: ApiError) -> None:
        """A stream that fails says so in its last event. There is no [DONE]: it is not done."""
        assert self._response is not None
        try:
            await self._response.write(b"data: " + error.body() + b"\n\n")
            await self._response.write_eof()
        except ConnectionResetError:
            self._log.info("the client left before it could be told of %s", error.code)

    # -- the end

    def _finish(self) -> None:
        """Everything was sent."""
        for choice in self.choices:
            self._record(choice, choice.outcome or FinishReason.ERROR, "", 200)

    def _cancel(self) -> int:
        return sum(choice.cancel("abort") for choice in self.choices)

    def _leave(self, reason: FinishReason, code: str, status: int) -> None:
        """It ends otherwise than by being served, and it ends now: what the engine still says of it adds facts to the
        records, and no time."""
        now_ns = time.monotonic_ns()  # before anything else: it is the end of the last stage
        self._cancel()
        if not self.choices:
            self._publish_record(0, None, reason, code, status, now_ns)
            return
        for choice in self.choices:
            choice.end_ns = now_ns
        task = asyncio.get_running_loop().create_task(self._settle(reason, code, status), name=f"settle-{self.id}")
        self._kitchen.settling.add(task)
        task.add_done_callback(self._kitchen.settling.discard)

    async def _settle(self, reason: FinishReason, code: str, status: int) -> None:
        for choice in self.choices:
            try:
                async with asyncio.timeout(_SETTLE_S):
                    while not choice.done:
                        choice.take(await next_output(choice))
            except StopAsyncIteration:
                choice.lost()
            except TimeoutError:
                self._log.warning("the engine did not say how a cancelled choice ended")
            if choice.outcome in (FinishReason.STOP, FinishReason.LENGTH) and reason is not FinishReason.ABORT:
                self._record(choice, choice.outcome, "", status)  # this one was served; another one failed
            else:
                own = choice.outcome in (FinishReason.DEADLINE, FinishReason.ERROR)
                self._record(choice, choice.outcome if own and choice.outcome else reason, code, status)

    def _record(self, choice: Choice, reason: FinishReason, code: str, status: int) -> None:
        if choice.first_ns and not choice.announced:
            self._first(choice)
        self._publish_record(self.choices.index(choice), choice, reason, code, status, choice.end_ns)

    def _publish_record(
        self, index: int, choice: Choice | None, reason: FinishReason, code: str, status: int, end_ns: int
    ) -> None:
        ask = self._ask
        record = compose(
            self._watch,
            self.trace,
            choice,
            at_ns=end_ns,
            request_id=choice.request.id if choice else f"{self.id}-0",
            group_id=self.group_id,
            index=index,
            model=self._kitchen.served.names[0],
            operation=self._operation,
            stream=bool(ask and ask.stream),
            reason=str(reason),
            error=code,
            status=status,
            prompt_tokens=len(choice.request.prompt) if choice else self._prompt_tokens,
            n=ask.n if ask else 1,
        )
        self._kitchen.publish(record)
        if self._kitchen.mix is not None and choice is not None:
            self._kitchen.mix.prompt(choice.request.prompt)
            self._kitchen.mix.ended()
        self._log.info(
            "%s %s: %s, %d prompt tokens, %d output tokens, %.1f ms",
            record.operation,
            record.request_id,
            record.error or record.reason,
            record.prompt_tokens,
            record.output_tokens,
            (end_ns - record.arrival_ns) / 1e6,
        )
