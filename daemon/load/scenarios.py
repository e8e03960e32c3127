"""The scenarios of a load test, by name: each is a mix of autotune/workload.py, with its lengths replaced if asked.

Imported by the command line to name its choices, so nothing slow may be imported here. Enter at `scenario`.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

    from autotune.workload import Mix

# autotune.workload's LENGTHS and ARRIVALS, sorted.
SCENARIOS: Final = (
    *("agent", "bimodal", "fixed", "heavy", "lognormal"),
    *("long", "mixed", "shared", "short", "turns"),
)
ARRIVALS: Final = ("bursty", "diurnal", "poisson", "switching")


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


def scenario(name: str, prompt: Lengths | None = None, output: Lengths | None = None) -> "Mix":
    """The mix of that name, with its lengths replaced where given. Raises KeyError."""
    from autotune.workload import MIXES

    mix = MIXES[name]
    if prompt is None and output is None:
        return mix

    def draw(rng: "random.Random") -> tuple[str, int, int]:
        kind, prompt_tokens, output_tokens = mix.draw(rng)
        return kind, prompt.draw(rng) if prompt else prompt_tokens, output.draw(rng) if output else output_tokens

    return replace(mix, draw=draw)
