"""The load of an ablation: a mix that gives every feature something to do. Pure.

Shared beginnings (prefix cache), long prompts among short ones (chunked prefill), answers of very different length
(continuous batching, paged KV). It must not know text, HTTP or features. Enter at `mixture`.
"""

import random

from autotune.workload import Mix

_KINDS = (("shared", 0.5), ("short", 0.3), ("long", 0.2))


def mixture(longest: int) -> Mix:
    """Lengths are shares of `longest`, the longest context in tokens that the server takes."""

    def between(rng: random.Random, low: float, high: float) -> int:
        least = max(1, int(longest * low))
        return rng.randint(least, max(least, int(longest * high)))

    def draw(rng: random.Random) -> tuple[str, int, int]:
        kind = rng.choices([name for name, _ in _KINDS], [weight for _, weight in _KINDS])[0]
        prompt = between(rng, 0.45, 0.6) if kind == "long" else between(rng, 0.02, 0.06)
        answer = between(rng, 0.01, 0.03) if rng.random() < 0.7 else between(rng, 0.1, 0.16)
        return kind, prompt, answer

    return Mix(draw=draw, systems=2, system_tokens=max(1, int(longest * 0.2)), shared=frozenset({"shared"}))
