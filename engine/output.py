"""Output: what comes out of the engine, immutable.

A msgspec Struct and not a dataclass as what goes in (engine/request.py), since one is made for every row in every step,
and a dataclass takes three times as long to make. It must not know the scheduler or HTTP; the device never sees it.
"""

import msgspec

from engine.request import EngineFacts, FinishReason, TokenLogprob


class Output(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """New tokens of one choice, or its end, or both. The last Output of a choice has `finish` and `facts`."""

    request_id: str
    tokens: tuple[int, ...] = ()
    at_ns: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish: FinishReason | None = None
    stop_token: int | None = None  # the token that stopped it; not in `tokens`
    error_code: str = ""
    error: str = ""
    facts: EngineFacts | None = None
