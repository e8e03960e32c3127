"""What becomes of sampled tokens: kept, or the end of the choice. Changes the sequence's tokens and nothing else.

It must not know blocks, rows or other sequences. Enter at `accept`.
"""

from engine.plan import StepResult
from engine.request import FinishReason, TokenLogprob
from engine.sequence import Sequence

Accepted = tuple[tuple[int, ...], FinishReason | None, int | None]  # tokens kept; why it ends; the token that ended it
Logprobs = tuple[tuple[TokenLogprob, ...], tuple[TokenLogprob | None, ...]]  # of sampled tokens; of the prompt's
NO_LOGPROBS: Logprobs = ((), ())


def accept(sequence: Sequence, tokens: tuple[int, ...], most: int) -> Accepted:
    """Append tokens until one ends the choice: one of its stop tokens (which is not part of the answer) once
    `min_tokens` are there, or the last that fits into its length and into the `most` tokens there is room for."""
    known, stops = sequence.tokens, sequence.stops
    if most > sequence.max_len:
        most = sequence.max_len
    for index, token in enumerate(tokens):
        if token in stops and sequence.output_len >= sequence.request.sampling.min_tokens:
            return tokens[:index], FinishReason.STOP, token
        known.append(token)
        if len(known) >= most:
            return tokens[: index + 1], FinishReason.LENGTH, None
    return tokens, None, None


def logprobs_of(sequence: Sequence, start: int, result: StepResult, index: int) -> Logprobs:
    """The log-probabilities that slice `index`, which began at `start`, yielded: those of sampled tokens, and those of
    prompt tokens that came for the first time (after a preemption they come again).

    Position p yields that of prompt token p + 1; the first token has none (None).
    """
    sampled = result.logprobs[index] if result.logprobs else ()
    if not result.prompt_logprobs or sequence.request.sampling.prompt_logprobs is None:
        return sampled, ()
    found: tuple[TokenLogprob | None, ...] = result.prompt_logprobs[index]
    first = start + 1
    if start == 0:
        found, first = (None, *found), 0
    new = found[max(0, sequence.prompt_logprobs_sent - first) :]
    sequence.prompt_logprobs_sent += len(new)
    return sampled, new
