"""Request, SamplingParams, EngineFacts: what goes into the engine and what is known at the end, immutable.

Plain dataclasses, so that the device plane can read SamplingParams on a machine without msgspec; `engine.wire`
encodes them. It must not know the scheduler, the device or HTTP.
"""

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a choice ended. `shed` and `rejected` never reach the engine."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    SHED = "shed"
    DEADLINE = "deadline"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. The order of application: penalties and bias, then temperature, top-k, top-p,
    min-p; `temperature == 0` is greedy (arg-max after penalties and bias)."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output (CTRL, arXiv:1909.05858)
    presence_penalty: float = 0.0  # over output only, as OpenAI defines it
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # always decided before the engine: the draw depends on (seed, position) alone
    logprobs: int | None = None  # None = off; k = chosen token plus the k best
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # the model's end tokens are here too, unless ignored

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One choice. `n` choices of one HTTP request share `group_id` and prompt; the engine shares their blocks."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    group_id: str = ""
    index: int = 0
    priority: int = 0  # lower is more urgent
    deadline_ns: int = 0  # monotonic; 0 = none
    cache_salt: str = ""
    sent_ns: int = 0  # when the daemon handed it to the wire


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of `token`, its rank (1 = best), and the `top` alternatives, best first."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the engine knows of a choice at its end. Stages in ns are the engine's part of the timeline's partition:
    queue + prefill + prefill_wait + decode + preempted = emitted_ns - received_ns. `pieces` are these stages in the
    order in which they passed, as (stage, ns, tokens computed), a prefill chunk each; none if there were too many."""

    received_ns: int
    emitted_ns: int
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    queue_ns: int = 0
    prefill_ns: int = 0
    prefill_wait_ns: int = 0
    decode_ns: int = 0
    preempted_ns: int = 0
    decode_stall_ns: int = 0
    pieces: tuple[tuple[str, int, int], ...] = ()
    cached_tokens: int = 0
    prefill_chunks: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0
    kv_blocks: int = 0
    kv_tail_slots: int = 0
