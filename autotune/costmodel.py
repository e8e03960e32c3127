"""What the cost of a step means for a number of rows: the steady state that it leads to. Pure.

It must not know limits, rules or where steps come from. Enter at `forecast`.
"""

import math
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
    """What requests are like, on average: tokens to compute of a prompt, tokens of an answer, positions of context."""

    prompt_tokens: float
    output_tokens: float
    context_tokens: float


def forecast(cost: StepCost, demand: Demand, rows: float, chunk: float) -> Forecast:
    """`rows` sequences at any moment, each replaced when it ends: in a step, rows ÷ output sequences end and bring
    their prompts in chunks."""
    rows, chunk = max(1.0, rows), max(1.0, chunk)
    prefill = rows * demand.prompt_tokens / max(1.0, demand.output_tokens)  # tokens a step
    context = rows * demand.context_tokens
    decode_s = cost.seconds(StepShape(0, rows, context))
    token_s = cost.prefill_s + cost.pair_s * demand.prompt_tokens / 2  # on average it attends to half of its prompt
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
