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
    """`rows` sequences at any moment, each replaced when it ends: in a step, rows ÷ output sequences end and bring
    their prompts in chunks."""
    rows, chunk = max(1.0, rows), max(1.0, chunk)
    prefill = rows * demand.prompt_tokens / max(1.0, demand.output_tokens)  # tokens a step
    context = rows * demand.context_tokens
    decode_s = cost.seconds(StepShape(0, rows, context))
    token_s = cost.prefill_s + cost.pair_s * demand.depth_tokens
    share = min(1.0, prefill / chunk)
    # More prompt than chunks can carry: rows wait for their prompts, and fewer of them decode.
    busy = min(1.0, chunk / prefill) if prefill > chunk else 1.0
    step_s = decode_s + token_s * min(prefill, chunk)
    tokens = rows * busy / step_s if step_s > 0 else math.inf
    return Forecast(
        tokens_per_s=tokens,
        requests_per_s=tokens / max(1.0, demand.output_tokens),
        inter_token_s=decode_s,
        mixed_step_s=decode_s + token_s * chunk,
        mixed_share=share,
    )
