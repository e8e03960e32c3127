"""The load of an ablation: seeded requests that give every feature something to do. Pure.

Shared beginnings (prefix cache), long prompts among short ones (chunked prefill), answers of very different length
(continuous batching, paged KV). It must not know HTTP or features. Enter at `Mixture.request`.
"""

import random
from dataclasses import dataclass

from daemon.load.scenarios import Lengths
from daemon.load.workload import LoadRequest, Sizer, sentence

_SYSTEMS = 2
_KINDS = (("shared", 0.5), ("short", 0.3), ("long", 0.2))


@dataclass(frozen=True, slots=True)
class Mixture:
    """Lengths are shares of `longest`, the longest context in tokens that the server takes."""

    seed: int
    longest: int
    sizer: Sizer

    def request(self, index: int) -> LoadRequest:
        rng = random.Random(f"{self.seed}:{index}")
        kind = rng.choices([name for name, _ in _KINDS], [weight for _, weight in _KINDS])[0]
        prompt = self._span(0.45, 0.6) if kind == "long" else self._span(0.02, 0.06)
        tokens, text = prompt.draw(rng), ""
        if kind == "shared":
            system = max(1, int(self.longest * 0.2))
            text = sentence(random.Random(f"{self.seed}:system:{rng.randrange(_SYSTEMS)}"), self.sizer.words(system))
            tokens += system
        own = max(1, tokens - (int(self.longest * 0.2) if text else 0))
        text = f"{text} {sentence(rng, self.sizer.words(own))}".strip()
        answer = self._span(0.005, 0.02) if rng.random() < 0.7 else self._span(0.04, 0.06)
        return LoadRequest(index, kind, text, tokens, answer.draw(rng), rng.randrange(2**31))

    def _span(self, low: float, high: float) -> Lengths:
        least = max(1, int(self.longest * low))
        return Lengths(least, max(least, int(self.longest * high)))
