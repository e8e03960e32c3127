"""Choice: one choice on its way from engine outputs to text: detokenized, cut at stop strings, with log-probabilities.

Owns what was released to the client and what is held back. It must not know HTTP or JSON. Enter at `take`; after it,
`text`, `entries` and `tokens` are what may be sent now, `finish` and `error` how it ended, `done` that all is over.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from daemon.api.errors import ApiError, from_outcome
from daemon.api.textport import Detokenizer, Stops, TextPort
from daemon.port import OutputStream
from engine.output import Output
from engine.request import EngineFacts, FinishReason, Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class Entry:
    """One token's log-probability (None: the first of a prompt has none), at `offset` characters into the text."""

    token: int
    offset: int
    logprob: TokenLogprob | None


class Choice:
    """`echo` is the prompt's text if the client wants it back; `prompt_offset` shifts the entries behind it."""

    def __init__(
        self, request: Request, stream: OutputStream, text: TextPort, stop: Sequence[str], echo: str | None
    ) -> None:
        self.request = request
        self.stream = stream
        self.echo = echo
        # What may be sent now.
        self.text = ""
        self.entries: list[Entry] = []
        self.tokens: tuple[int, ...] = ()
        # How it ended.
        self.finish: str | None = None  # stop | length
        self.error: ApiError | None = None
        self.outcome: FinishReason | None = None
        self.done = False
        self.announced = False  # its first token was published
        self.closed = False  # the chunk with its finish reason was written
        # Facts for the record.
        self.facts: EngineFacts | None = None
        self.taken_ns = 0
        self.end_ns = 0
        self.first_ns = 0
        self.last_ns = 0
        self.output_tokens = 0
        self.detokenize_ns = 0
        self.send_ns = 0
        # What is held back.
        self._port = text
        self._detokenizer: Detokenizer = text.detokenizer()
        self._stops: Stops | None = text.stops(stop) if stop else None
        self._held: deque[Entry] = deque()
        self._shift = len(echo or "")
        self._produced = 0
        self._released = 0
        self._fresh = True
        self._cancelled = False

    def take(self, output: Output) -> None:
        """One Output. What `text` and `entries` held before is gone: they are what this Output adds."""
        start_ns = time.monotonic_ns()
        self.text, self.entries, self.tokens = "", [], ()
        if self._fresh:
            self._fresh = False
            self._begin(output)
        if output.tokens and self.finish is None:
            self.first_ns = self.first_ns or start_ns
            self.last_ns = start_ns
            self._add(output)
        if output.finish is not None:
            self._end(output)
        self.taken_ns = time.monotonic_ns()
        self.detokenize_ns += self.taken_ns - start_ns

    def cancel(self, reason: str) -> bool:
        """Tell the engine to stop, once. False if it has ended or was told before."""
        if self.done or self._cancelled:
            return False
        self._cancelled = True
        self.stream.cancel(reason)
        return True

    def lost(self) -> None:
        """Its stream ended without a last Output; does not happen unless an EnginePort breaks its word."""
        self.done = True
        self.error = self.error or from_outcome("engine_died", "the engine gave no answer")
        self.outcome = FinishReason.ERROR

    def _begin(self, output: Output) -> None:
        if self.echo is not None:
            self.text = self.echo
            if output.prompt_logprobs:
                self.entries = prompt_entries(self._port, self.request.prompt, output.prompt_logprobs)

    def _add(self, output: Output) -> None:
        self.tokens = output.tokens
        push = self._detokenizer.push
        if self._stops is None and not output.logprobs:  # the way of nearly every token
            piece = "".join([push(token) for token in output.tokens])
            self.output_tokens += len(output.tokens)
            self.text += piece
            return
        for i, token in enumerate(output.tokens):
            self.output_tokens += 1
            if output.logprobs:
                self._held.append(Entry(token, self._produced, output.logprobs[i]))
            piece = push(token)
            self._produced += len(piece)
            # A stop string counts only once min_tokens have been produced.
            if self._stops is not None and self.output_tokens > self.request.sampling.min_tokens:
                piece = self._stops.push(piece)
            self._release(piece)
            if self._stops is not None and self._stops.hit:
                self._held.clear()
                self.tokens = output.tokens[: i + 1]
                self.finish = "stop"
                self.cancel("stop")
                return

    def _end(self, output: Output) -> None:
        self.done = True
        self.facts = output.facts
        reason = self.outcome = output.finish
        if self.finish is not None:  # by a stop string: what the engine calls it does not matter
            self.outcome = FinishReason.STOP
        elif reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._flush()
            if self.finish is None:
                self.finish = str(reason)
        else:
            code = output.error_code or str(reason)
            self.error = from_outcome(code, output.error)

    def _flush(self) -> None:
        """Nothing more will come: what was held back is text after all."""
        piece = self._detokenizer.flush()
        self._produced += len(piece)
        if self._stops is None:
            self.text += piece
        else:
            self._release(self._stops.push(piece) if piece else "")
            if self._stops.hit:
                self._held.clear()
                self.finish = "stop"
                return
            self._release(self._stops.flush())
        self.entries.extend(self._shifted(self._held))
        self._held.clear()

    def _release(self, piece: str) -> None:
        self.text += piece
        self._released += len(piece)
        while self._held and self._held[0].offset < self._released:
            self.entries.extend(self._shifted([self._held.popleft()]))

    def _shifted(self, entries: Sequence[Entry] | deque[Entry]) -> list[Entry]:
        return [Entry(e.token, e.offset + self._shift, e.logprob) for e in entries]


def prompt_entries(text: TextPort, prompt: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> list[Entry]:
    """An echoed prompt's log-probabilities, each at its place in the text."""
    return [Entry(*entry) for entry in zip(prompt, text.offsets(prompt), logprobs, strict=False)]
