"""Streams: the outputs of live choices on their way from the engine to whoever reads them.

Owns the map of live choices and what each has not been read of. It must not know sockets or processes. A choice leaves
the map with its last Output, and `end_all` gives one to every choice whose engine is gone. Enter at `StreamTable.open`.
No task and no timer per token: a batch of outputs wakes each reader at most once.
"""

import asyncio
from collections.abc import Callable

import msgspec

from engine.output import Output
from engine.request import EngineFacts, FinishReason
from telemetry.events import StepReport

ENGINE_DIED = "engine_died"


class Stream:
    """daemon.port.OutputStream. Its reader is one task of the daemon's loop."""

    __slots__ = (
        "_acknowledge",
        "_cancel",
        "_pending",
        "_waiter",
        "finished",
        "first_token_ns",
        "last_token_ns",
        "request_id",
        "scheduled_ns",
        "sent_ns",
    )

    def __init__(
        self,
        request_id: str,
        sent_ns: int,
        acknowledge: Callable[[str, int], None],
        cancel: Callable[["Stream", str], None],
    ) -> None:
        self.request_id = request_id
        self.sent_ns = sent_ns
        self.scheduled_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0
        self.finished = False
        self._pending: list[Output] = []
        self._waiter: asyncio.Future[None] | None = None
        self._acknowledge = acknowledge
        self._cancel = cancel

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Output:
        """All that came since the last call, as one Output. Taking it gives the engine credit for as many tokens."""
        while not self._pending:
            if self.finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self._pending = self._pending, []
        output = taken[0] if len(taken) == 1 else joined(taken)
        if output.tokens and not self.finished:
            self._acknowledge(self.request_id, len(output.tokens))
        return output

    def cancel(self, reason: str = "abort") -> None:
        """Tell the engine to stop this choice; its last Output still comes. Nothing happens if it has ended."""
        if not self.finished:
            self._cancel(self, reason)

    def push(self, output: Output) -> None:
        """One more output; wakes the reader."""
        if output.tokens:
            self.last_token_ns = output.at_ns
            self.first_token_ns = self.first_token_ns or output.at_ns
        self.finished = output.finish is not None
        self._pending.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def facts_at_death(self, now_ns: int) -> EngineFacts:
        """What the daemon itself knows of a choice whose engine cannot tell any more; the stages sum as always."""
        start_ns = self.sent_ns
        first_ns = self.first_token_ns
        scheduled_ns = self.scheduled_ns or first_ns
        scheduled_ns = max(start_ns, scheduled_ns) if scheduled_ns else 0
        queue_end_ns = scheduled_ns or now_ns
        prefill_end_ns = max(queue_end_ns, first_ns or now_ns)
        return EngineFacts(
            received_ns=start_ns,
            emitted_ns=now_ns,
            scheduled_ns=scheduled_ns,
            first_token_ns=first_ns,
            last_token_ns=self.last_token_ns,
            queue_ns=queue_end_ns - start_ns,
            prefill_ns=prefill_end_ns - queue_end_ns,
            decode_ns=now_ns - prefill_end_ns,
        )


def joined(outputs: list[Output]) -> Output:
    """Several outputs of one choice as one: tokens in order, and the last one's end and stamp."""
    return msgspec.structs.replace(
        outputs[-1],
        tokens=tuple(token for output in outputs for token in output.tokens),
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        prompt_logprobs=tuple(entry for output in outputs for entry in output.prompt_logprobs),
    )


class StreamTable:
    """The live choices by id. `admitted` may be called from the telemetry thread, the rest from the loop."""

    def __init__(self, acknowledge: Callable[[str, int], None], cancel: Callable[[Stream, str], None]) -> None:
        self._live: dict[str, Stream] = {}
        self._acknowledge = acknowledge
        self._cancel = cancel

    def __len__(self) -> int:
        return len(self._live)

    def ids(self) -> tuple[str, ...]:
        """Of the live choices."""
        return tuple(self._live)

    def open(self, request_id: str, sent_ns: int) -> Stream:
        if request_id in self._live:
            raise ValueError(f"request id {request_id} is in use")
        stream = self._live[request_id] = Stream(request_id, sent_ns, self._acknowledge, self._cancel)
        return stream

    def deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._live.get(output.request_id)
            if stream is None:
                continue  # it ended here before the engine heard of it
            stream.push(output)
            if output.finish is not None:
                del self._live[output.request_id]

    def admitted(self, report: StepReport) -> None:
        """Note when each choice got its row: needed only if the engine dies with the rest of the story."""
        for _, request_id in report.admitted:
            stream = self._live.get(request_id)
            if stream is not None and not stream.scheduled_ns:
                stream.scheduled_ns = report.at_ns

    def end_all(self, why: str, now_ns: int) -> tuple[str, ...]:
        """Give every live choice its last Output: an error. Returns their ids."""
        ended = tuple(self._live)
        for stream in self._live.values():
            stream.push(
                Output(
                    request_id=stream.request_id,
                    finish=FinishReason.ERROR,
                    error_code=ENGINE_DIED,
                    error=why,
                    facts=stream.facts_at_death(now_ns),
                    at_ns=now_ns,
                )
            )
        self._live.clear()
        return ended
