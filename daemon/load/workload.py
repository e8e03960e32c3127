"""What a load test asks for: which prompts, how long, how much output, when. Pure and seeded.

Owns the scenarios and how a request of a given length becomes text. It must not know HTTP, clocks or results. Enter at
`Workload.request(index)`; the same seed and sizes give the same requests on any machine.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

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
class Lengths:
    """Token counts drawn uniformly from [low, high]."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"{self.low}:{self.high} is not a range of token counts (1 ≤ low ≤ high)")

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """`N` or `LOW:HIGH`. Raises ValueError."""
        low, _, high = text.partition(":")
        return cls(int(low), int(high or low))


@dataclass(frozen=True, slots=True)
class Share:
    """One kind of request: its weight among the others, its prompt and its output lengths."""

    kind: str
    weight: float
    prompt: Lengths
    output: Lengths


SHORT: Final = Share("short", 1.0, Lengths(50, 150), Lengths(32, 96))
LONG: Final = Share("long", 1.0, Lengths(1500, 2500), Lengths(32, 96))
# `mixed` is the case in which a long prompt makes short ones wait: one request in five is twenty times as long.
SCENARIOS: Final[dict[str, tuple[Share, ...]]] = {
    "short": (SHORT,),
    "long": (LONG,),
    "mixed": (replace(SHORT, weight=4.0), LONG),
}


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


def scenario(name: str, prompt: Lengths | None = None, output: Lengths | None = None) -> tuple[Share, ...]:
    """The shares of a named scenario, with its lengths replaced where given. Raises KeyError."""
    return tuple(replace(s, prompt=prompt or s.prompt, output=output or s.output) for s in SCENARIOS[name])


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
