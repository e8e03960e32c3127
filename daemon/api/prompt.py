"""From a checked Ask to the engine's requests: tokens, the context's limit, seeds.

Owns the defaults that depend on the prompt's length. It must not know HTTP or streams. Enter at `encoded`, then
`checked`: between them a request that is too long for now may be held.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from daemon.api.errors import ApiError, invalid
from daemon.api.schema import Ask
from daemon.api.textport import TextPort
from engine.request import Request, SamplingParams

_INLINE_CHARS: Final = 4096  # longer texts are tokenized in a thread: the loop has streams to serve
_SEED_MASK: Final = 2**63 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15  # spreads the seeds of a group's choices (Steele et al., SplitMix, 2014)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """An Ask with its prompts as tokens, each with the number of tokens it may produce."""

    ask: Ask
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    echoes: tuple[str, ...]
    eos_token_ids: tuple[int, ...]

    def requests(self, response_id: str, deadline_ns: int, now_ns: int) -> list[Request]:
        """One Request a choice, ids `response_id-0…`; the choices of one prompt form a group and come together."""
        ask = self.ask
        seed = secrets.randbits(63) if ask.seed is None else ask.seed & _SEED_MASK
        stop_ids = ask.stop_token_ids + (() if ask.ignore_eos else self.eos_token_ids)
        return [
            Request(
                id=f"{response_id}-{p * ask.n + i}",
                prompt=prompt,
                sampling=SamplingParams(
                    **ask.sampling,
                    max_tokens=self.max_tokens[p],
                    seed=(seed + i * _GOLDEN) & _SEED_MASK,
                    logit_bias=ask.logit_bias,
                    logprobs=ask.logprobs,
                    prompt_logprobs=ask.logprobs if ask.echo else None,
                    stop_token_ids=stop_ids,
                ),
                group_id=f"{response_id}-p{p}",
                index=i,
                priority=ask.priority,
                deadline_ns=deadline_ns,
                cache_salt=ask.cache_salt,
                sent_ns=now_ns,
            )
            for p, prompt in enumerate(self.prompts)
            for i in range(ask.n)
        ]

    def echo_of(self, prompt: int) -> str | None:
        return self.echoes[prompt] if self.ask.echo else None


@dataclass(frozen=True, slots=True)
class Context:
    """Tokens of prompt and output that a request may have: now, and when the live limit is at its ceiling; and why the
    limit is in force."""

    limit: int
    ceiling: int
    why: str = ""

    def lowered_below(self, tokens: int) -> bool:
        """Whether a request of so many tokens is too long for now, and not for ever."""
        return self.limit < tokens <= self.ceiling


_LIMITED_RETRY_S = 30  # a few control periods of the tuner


async def encoded(ask: Ask, text: TextPort) -> tuple[tuple[int, ...], ...]:
    """The prompts as tokens. Raises ApiError (400), or what `text` raises for something that cannot be encoded."""
    _check_ids("stop_token_ids", ask.stop_token_ids, text.vocab_size)
    _check_ids("logit_bias", [token for token, _ in ask.logit_bias], text.vocab_size)
    if ask.operation == "chat":
        return (await encode_chat(ask.messages, text),)
    return tuple([await encode_prompt(prompt, text) for prompt in ask.prompts])


def longest(ask: Ask, prompts: Sequence[Sequence[int]]) -> int:
    """Tokens of the longest prompt and its answer, which is at least one."""
    return max(map(len, prompts)) + _asked(ask.max_tokens)


def checked(
    ask: Ask, prompts: tuple[tuple[int, ...], ...], text: TextPort, eos_token_ids: tuple[int, ...], context: Context
) -> Prepared:
    """Checked against the context that may be had now. Raises ApiError (400; 503 for what is too long for now)."""
    name = "messages" if ask.operation == "chat" else "prompt"
    limits = tuple([_room(name, len(tokens), ask.max_tokens, context) for tokens in prompts])
    echoes: tuple[str, ...] = ()
    if ask.echo:
        echoes = tuple(
            prompt if isinstance(prompt, str) and ask.logprobs is None else text.decode(tokens)
            for prompt, tokens in zip(ask.prompts, prompts, strict=True)
        )
    return Prepared(ask, prompts, limits, echoes, eos_token_ids)


async def encode_chat(messages: Sequence[dict[str, str]], text: TextPort) -> tuple[int, ...]:
    """Chat messages through the model's template. Raises ApiError (400) if nothing comes out."""
    size = sum(len(message["content"]) for message in messages)
    return _not_empty("messages", await _apart(size, lambda: text.encode_chat(messages)))


async def encode_prompt(prompt: str | tuple[int, ...], text: TextPort) -> tuple[int, ...]:
    """A prompt's tokens; those that are tokens already are checked against the vocabulary."""
    if not isinstance(prompt, str):
        _check_ids("prompt", prompt, text.vocab_size)
        return prompt
    return _not_empty("prompt", await _apart(len(prompt), lambda: text.encode(prompt)))


async def _apart(size_chars: int, work: Callable[[], T]) -> T:
    """`work`'s result, computed beside the loop if the text is long (the tokenizer lets go of the interpreter lock)."""
    return work() if size_chars <= _INLINE_CHARS else await asyncio.to_thread(work)


def _not_empty(name: str, tokens: Sequence[int]) -> tuple[int, ...]:
    if not tokens:
        raise invalid(f"{name} has no tokens", name, "empty_prompt")
    return tuple(tokens)


def _check_ids(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        raise invalid(f"{name}: a token id is outside the vocabulary of {vocab_size}", name)


def _asked(max_tokens: int | None) -> int:
    return 1 if max_tokens is None else max_tokens


def _room(name: str, prompt_tokens: int, max_tokens: int | None, context: Context) -> int:
    """How many tokens may follow the prompt."""
    asked, context_limit = _asked(max_tokens), context.limit
    if context.lowered_below(prompt_tokens + asked):
        why = f": {context.why}" if context.why else ""
        raise ApiError(
            503,
            f"requests are limited to {context_limit} tokens for now, of the {context.ceiling} that are served at "
            f"other times{why}; {prompt_tokens} in {name} and {asked} to come are more",
            code="context_limited",
            param=name,
            retry_after_s=_LIMITED_RETRY_S,
        )
    if prompt_tokens + asked > context_limit:
        raise ApiError(
            400,
            f"this model's context is {context_limit} tokens; {prompt_tokens} in {name} and {asked} to come are more",
            code="context_length_exceeded",
            param=name,
        )
    return context_limit - prompt_tokens if max_tokens is None else max_tokens
