"""Which targets are missed, whether they can be met at all, and why not. For people.

Owns how long a target must be missed until that is said, and the words. It must not know rules or change anything.
Enter at `Missed.look`, once per control period.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from autotune.change import Known
from autotune.window import Window
from engine.budget import Limits

LASTING = 4  # windows; with periods of 5 s a missed target is told of within 20 s
_OF = 6  # the last so many: of few requests one window may be in time by luck


@dataclass(slots=True)
class Missed:
    """What is missed now, by target; empty while all are met, or not for long."""

    now: dict[str, str] = field(default_factory=dict)
    _late: dict[str, deque[bool]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=_OF)))

    def look(self, window: Window, limits: Limits, known: Known, trying: str) -> None:
        """`trying`: what is being changed now, empty if nothing is. A window without work ends every miss."""
        seen = {"ttft_s": window.ttft_p95_s, "inter_token_s": window.inter_token_p95_s}
        self.now = {}
        for name, figure in seen.items():
            target = getattr(known.targets, name)
            late = self._late[name]
            if window.idle or not target:
                late.clear()
            elif figure is not None:
                late.append(figure > target)
            if figure is not None and sum(late) >= LASTING:
                why = _slow_gaps(window, known, target) if name == "inter_token_s" else _late_starts(window, known)
                hope = f"trying: {trying}" if trying else "no limit mends that now"
                self.now[name] = f"{figure:.3g} s at the 95th percentile where {target:g} s is wanted: {why}; {hope}"


def _late_starts(window: Window, known: Known) -> str:
    waits = f"{window.waiting:.0f} wait behind {window.running:.0f} that run"
    if window.waiting >= 1:
        rate = f", and {window.finished / window.seconds:.2g} end a second" if window.finished else ""
        held = "blocks of the pool" if window.waiting_kv >= max(1.0, window.waiting_capacity) else "rows"
        return f"more arrives than is served: {waits}{rate}; they wait for {held}"
    if known.cost is not None and known.demand is not None and known.cost.prefill_s > 0:
        alone_s = known.cost.prefill_s * known.demand.prompt_tokens
        return f"computing a prompt of {known.demand.prompt_tokens:.0f} tokens takes {alone_s:.2g} s by itself"
    return waits


def _slow_gaps(window: Window, known: Known, target: float) -> str:
    alone = known.at(1, 1)
    if alone is not None and alone.inter_token_s > target:
        return f"a step of one row takes {alone.inter_token_s:.2g} s by itself on this machine"
    return f"steps with {window.running:.0f} rows and pieces of prompts are that long"
