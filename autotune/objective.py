"""What is wanted: targets of latency, or throughput alone, and how well a window of serving met that.

Owns the targets, the presets of `--for`, and goodput: output tokens per second of requests that met every target and
were not truncated or shed. It must not know knobs' bounds or how anything is measured. Enter at `PRESETS`, `Targets`
and `goodput`.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """At the 95th percentile, in seconds; 0 = none is set, and throughput is all that counts."""

    ttft_s: float = 0.0
    inter_token_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.ttft_s or self.inter_token_s)

    def met(self, ttft_s: float, inter_token_s: float) -> bool:
        """Whether one request did: its time to first token, and the mean gap between its tokens."""
        return not (self.ttft_s and ttft_s > self.ttft_s) and not (
            self.inter_token_s and inter_token_s > self.inter_token_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A documented set of targets and starting limits; a limit is given as a share of its ceiling."""

    about: str
    targets: Targets
    start: dict[str, float]

    def described(self) -> str:
        """All that it sets, for whoever chooses."""
        targets, start = self.targets, self.start
        wanted = f"TTFT {targets.ttft_s:g} s, inter-token {targets.inter_token_s:g} s" if targets else "no targets"
        begins = ", ".join(f"{limit} at {100 * share:g} % of its ceiling" for limit, share in start.items())
        return f"{self.about} ({wanted}; begins with {begins})"


PRESETS: Final[dict[str, Preset]] = {
    "chat": Preset(
        about="latency first: somebody reads along",
        targets=Targets(ttft_s=2.0, inter_token_s=0.2),
        start={"max_num_seqs": 0.5},
    ),
    "batch": Preset(
        about="throughput first: nobody waits for a token",
        targets=Targets(),
        start={"prefill_chunk": 1.0},
    ),
    "agent": Preset(
        about="prefix reuse first: long shared prompts, short answers; fewer at once leave room to the cache",
        targets=Targets(ttft_s=5.0, inter_token_s=0.5),
        start={"max_num_seqs": 0.25, "max_partial_prefills": 0.125},
    ),
}


def goodput(output_tokens_per_s: float, finished: int, good: int) -> float:
    """Tokens per second that count. A window in which nothing ended says nothing against what runs."""
    return output_tokens_per_s * (good / finished if finished else 1.0)
