"""What becomes of sampled tokens: kept, or the end of the choice. Changes the sequence's tokens, their stamps and
count, and nothing else. It must not know blocks, rows or other sequences. Enter at `accept`.
"""

from typing import NamedTuple

from engine.request import FinishReason, TokenLogprob
from engine.sequence import Sequence

Logprobs = tuple[tuple[TokenLogprob, ...], tuple[TokenLogprob | None, ...]]  # of sampled tokens; of the prompt's
NO_LOGPROBS: Logprobs = ((), ())


class End(NamedTuple):
    """Why a choice ends, which of the step's tokens it keeps, and the token that stopped it."""

    reason: FinishReason
    tokens: tuple[int, ...]
    stop_token: int | None = None


def accept(sequence: Sequence, tokens: tuple[int, ...], most: int, now_ns: int) -> End | None:
    """Append the tokens; None, if none of them ends the choice. What ends it is one of its stop tokens (which is not
    part of the answer) once `min_tokens` are there, or the last that fits into its length and into the `most` tokens
    there is room for."""
    known, end = sequence.tokens, None
    if most > sequence.max_len:
        most = sequence.max_len
    if len(known) + len(tokens) >= most or not sequence.stops.isdisjoint(tokens):
        end = _end(sequence, tokens, most)
        tokens = end.tokens if end else tokens
    if tokens or end:
        sequence.last_token_ns = now_ns
        if not sequence.first_token_ns:
            sequence.first_token_ns = now_ns
        sequence.unacked += len(tokens)
        known += tokens
    return end


def _end(sequence: Sequence, tokens: tuple[int, ...], most: int) -> End | None:
    """Where among `tokens`, which are not appended yet, the choice ends."""
    stops, min_tokens = sequence.stops, sequence.request.sampling.min_tokens
    for index, token in enumerate(tokens):
        if token in stops and sequence.output_len + index >= min_tokens:
            return End(FinishReason.STOP, tokens[:index], token)
        if len(sequence.tokens) + index + 1 >= most:
            return End(FinishReason.LENGTH, tokens[: index + 1])
    return None


def logprobs_of(
    sequence: Sequence, start: int, sampled: tuple[TokenLogprob, ...], prompt: tuple[TokenLogprob, ...]
) -> Logprobs:
    """The log-probabilities that a slice which began at `start` yielded: those of sampled tokens, and those of
    prompt tokens that came for the first time (after a preemption they come again).

    Position p yields that of prompt token p + 1; the first token has none (None).
    """
    if sequence.request.sampling.prompt_logprobs is None:
        return sampled, ()
    found: tuple[TokenLogprob | None, ...] = prompt
    first = start + 1
    if start == 0:
        found, first = (None, *found), 0
    new = found[max(0, sequence.prompt_logprobs_sent - first) :]
    sequence.prompt_logprobs_sent += len(new)
    return sampled, new
