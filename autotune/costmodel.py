"""What the cost of a step means for a number of rows: the steady state that it leads to. Pure.

It must not know limits, rules or where steps come from. Enter at `forecast`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.stepcost import StepCost, StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A steady state that the model expects."""

    tokens_per_s: float
    requests_per_s: float
    inter_token_s: float  # a decode-only step
    mixed_step_s: float  # a step that also computes a chunk of a prompt
    mixed_share: float  # of the steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What requests are like, on average: tokens to compute of a prompt, and how many each of them has before it;
    tokens of an answer, and positions of context."""

    prompt_tokens: float
    output_tokens: float
    context_tokens: float
    depth_tokens: float  # half a prompt where all are alike; more where most of what is computed is of the long ones

    @classmethod
    def of(cls, requests: Sequence[tuple[int, int, int]]) -> "Demand":
        """Of each, at least one: prompt tokens found in the cache, those computed, and tokens of the answer."""
        count, computed = len(requests), sum(prompt for _, prompt, _ in requests)
        pairs = sum(prompt * (cached + prompt / 2) for cached, prompt, _ in requests)
        return cls(
            prompt_tokens=computed / count,
            output_tokens=sum(output for _, _, output in requests) / count,
            context_tokens=sum(cached + prompt + output / 2 for cached, prompt, output in requests) / count,
            depth_tokens=pairs / computed if computed else 0.0,
        )


def forecast(cost: StepCost, demand: Demand, rows: float, chunk: float) -> Forecast:
    """`rows` sequences at any moment, each replaced when it ends. They go round between two places: a prompt waits for
    its turn and takes prompt ÷ chunk steps, an answer takes a step a token. How many are where is the closed network of
    one queue and one delay (mean value analysis after Schweitzer): all decode where chunks are large, and where they
    are too small rows wait for their prompts."""
    rows, chunk, answer = max(1.0, rows), max(1.0, chunk), max(1.0, demand.output_tokens)
    turn = demand.prompt_tokens / chunk  # steps
    crowded = turn * rows - answer
    waited = (crowded + math.sqrt(crowded**2 + 4 * turn * answer)) / 2  # steps from a prompt's arrival to its end
    ended = rows / (answer + waited)  # a step
    decoding, prefill = ended * answer, ended * demand.prompt_tokens
    decode_s = cost.seconds(StepShape(0, decoding, decoding * demand.context_tokens))
    token_s = cost.prefill_s + cost.pair_s * demand.depth_tokens
    step_s = decode_s + token_s * prefill
    tokens = decoding / step_s if step_s > 0 else math.inf
    return Forecast(
        tokens_per_s=tokens,
        requests_per_s=tokens / answer,
        inter_token_s=decode_s,
        mixed_step_s=decode_s + token_s * chunk,
        mixed_share=min(1.0, prefill / chunk),
    )
