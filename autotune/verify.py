"""What came of a change: the windows before it against those after it, and whether it may stay. Pure.

Owns the comparison. It must not know how a change is made or undone: that is autotune/online.py. Enter at `verdict`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from autotune.change import Change, Known
from autotune.objective import goodput
from autotune.window import Window
from autotune.worth import Worth
from engine.budget import Limits

_CLEARLY_WORSE = 0.8  # of what was before: below that no model is asked
_WORTH_IT = 0.01  # more tokens per second: that much a model has to expect of a change to be a reason for it
_ENOUGH = 1.1  # times what was before: more need not be seen, whatever was promised


@dataclass(frozen=True, slots=True)
class Found:
    """`why` is for people; `measured` has the goal's mean before and after, as far as it was measured."""

    better: bool
    why: str
    measured: dict[str, float]


def verdict(
    change: Change,
    before: Sequence[Window],
    after: Sequence[Window],
    were: Mapping[str, int],
    limits: Limits,
    known: Known,
) -> Found:
    """Whether the goal was reached. `were`: the limits that were changed, as they had been; `limits` are in force.

    Half of a promised gain is enough. Where the difference is smaller than what machines and loads do by themselves in
    a minute, the model of a step decides, which has seen both by now; but not over fewer rows: who takes them away has
    to show that it pays. And where the load is no longer there that a gain needs, nothing speaks against the change."""
    if change.goal == "goodput":
        worth = _worth(before, were, limits, known)
        was, now = (_rate(windows, worth) for windows in (before, after))
    else:
        was, now = _mean(change.goal, before), _mean(change.goal, after)
    measured = {name: value for name, value in (("before", was), ("after", now)) if value is not None}
    if was is None or now is None:
        return Found(True, f"{change.goal} was not measured", measured)
    got = f"{change.goal} {was:.4g} → {now:.4g}"
    if change.goal != "goodput":
        return Found(now < 0.98 * was, got, measured)
    if (_mean("waiting", after) or 0.0) < 0.5 <= (_mean("waiting", before) or 0.0):
        return Found(True, f"{got}, and nobody waits any more", measured)
    promised = change.predicted.get("gain", 0.0)
    wanted = min(was * (1 + 0.5 * min(0.2, promised)), _ENOUGH * was) if promised > 0 else 0.95 * was
    if now >= wanted or now < _CLEARLY_WORSE * was:
        return Found(now >= wanted, got, measured)
    gain = _expected(before, after, were, limits, known)
    fewer = "max_num_seqs" in were and limits.max_num_seqs < were["max_num_seqs"]
    if gain is None or fewer:
        return Found(False, got, measured)
    return Found(
        gain > _WORTH_IT, f"{got}, where the model of a step, which has seen both, expects {gain:+.0%}", measured
    )


def _worth(before: Sequence[Window], were: Mapping[str, int], limits: Limits, known: Known) -> Worth | None:
    """By which both times are measured: the steady state of the time before. So a change is not blamed for the prompts
    that it lets in and whose answers come later."""
    rows = max(1.0, _mean("running", before) or 1.0)
    there = known.at(rows, were.get("prefill_chunk", limits.prefill_chunk))
    if there is None or known.cost is None or known.demand is None or not there.tokens_per_s < float("inf"):
        return None
    return Worth(cost=known.cost, demand=known.demand, rows=rows, mixed_share=there.mixed_share)


def _rate(windows: Sequence[Window], worth: Worth | None) -> float | None:
    """Goodput of these windows together, of what was computed in them and not thrown away; of the tokens of answers
    alone, while nobody knows what those of prompts cost."""
    seconds = sum(window.seconds for window in windows)
    if not seconds:
        return None
    written = sum(window.output_tokens for window in windows)
    ended = sum(window.finished + window.shed for window in windows)
    rate = worth.rate(windows) if worth else written / seconds
    return goodput(rate, ended, sum(window.good for window in windows))


def _expected(
    before: Sequence[Window], after: Sequence[Window], were: Mapping[str, int], limits: Limits, known: Known
) -> float | None:
    """By how much the rows that run now, and their chunks, should be better than those before."""
    there = known.at(_mean("running", after) or 1.0, limits.prefill_chunk)
    here = known.at(_mean("running", before) or 1.0, were.get("prefill_chunk", limits.prefill_chunk))
    return there.tokens_per_s / here.tokens_per_s - 1 if there and here else None


def _mean(name: str, windows: Sequence[Window]) -> float | None:
    values = [value for window in windows if (value := getattr(window, name)) is not None]
    return fmean(values) if values else None
