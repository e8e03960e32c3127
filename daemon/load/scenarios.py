"""The scenarios of a load test: which kinds of request, in which shares, of which lengths. Pure data.

Imported by the command line to name its choices, so nothing slow may be imported here. Enter at `scenario`.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts drawn uniformly from [low, high]."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"{self.low}:{self.high} is not a range of token counts (1 ≤ low ≤ high)")

    def draw(self, rng: "random.Random") -> int:
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


def scenario(name: str, prompt: Lengths | None = None, output: Lengths | None = None) -> tuple[Share, ...]:
    """The shares of a named scenario, with its lengths replaced where given. Raises KeyError."""
    return tuple(replace(s, prompt=prompt or s.prompt, output=output or s.output) for s in SCENARIOS[name])
