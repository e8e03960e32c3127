"""What a load test asks for: which prompts, how long, how much output, when. Pure and seeded.

Owns how a request of a given length becomes text; the lengths are daemon/load/scenarios.py's. It must not know HTTP,
clocks or results. Enter at `Workload.request(index)`; the same seed and sizes give the same requests on any machine.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from daemon.load.scenarios import Share

# Common words that most tokenizers hold as one token each with their leading space.
_TEXT: Final = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education river stone light music paper summer garden bridge"
)
WORDS: Final = tuple(_TEXT.split())
_OPENING: Final = "Continue this list of words with other words, and do not stop:"


@dataclass(frozen=True, slots=True)
class Sizer:
    """How many words make a prompt of so many tokens. `source` says where the figures come from."""

    tokens_per_word: float = 1.0
    overhead_tokens: int = 0
    source: str = "words"

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.overhead_tokens) / self.tokens_per_word))


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send. `prompt_tokens` is what was aimed at; what the server counted is in its usage."""

    index: int
    kind: str
    prompt: str
    prompt_tokens: int
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one scenario, by index: any of them can be made alone."""

    shares: tuple[Share, ...]
    seed: int
    sizer: Sizer = Sizer()

    def request(self, index: int) -> LoadRequest:
        rng = random.Random(f"{self.seed}:{index}")
        share = rng.choices(self.shares, [s.weight for s in self.shares])[0]
        tokens = share.prompt.draw(rng)
        text = f"{_OPENING} {sentence(rng, self.sizer.words(tokens))}"
        return LoadRequest(index, share.kind, text, tokens, share.output.draw(rng), rng.randrange(2**31))


def sentence(rng: random.Random, words: int) -> str:
    """So many seeded words: past the opening no two requests share a beginning that a prefix cache could serve."""
    return " ".join(rng.choices(WORDS, k=words))


def calibration(words: int = 2000) -> tuple[str, str]:
    """Two texts to count with the server's tokenizer: the fixed opening, and the opening with `words` words."""
    return _OPENING, f"{_OPENING} {sentence(random.Random('calibration'), words)}"


def sized(opening_tokens: int, sample_tokens: int, words: int = 2000) -> Sizer:
    """The sizer that `calibration`'s two counts give."""
    return Sizer(max(0.1, (sample_tokens - opening_tokens) / words), opening_tokens, "tokenize")


def arrivals(rate: float, duration_s: float, seed: int) -> Iterator[float]:
    """Offsets in seconds of a Poisson process: independent users do not arrive in step."""
    rng = random.Random(f"{seed}:arrivals")
    at = rng.expovariate(rate)
    while at < duration_s:
        yield at
        at += rng.expovariate(rate)
