"""The tuner against static limits, live, on one load: what the four tuner_grid_* scripts share; not a script itself.

Some fifty minutes a load. The simulator, calibrated by a minute of the load, ranks 24 static settings. Its three best
and five spread over the rest, three of them in the worst quartile, run live. Then three rounds: each of the three best
again, and between them the tuner on a daemon of its own, which knows nothing yet, from the default limits; scored once
it had time to settle. The best run before the tuner and, in reverse, after it: a machine that is shared is a tenth
faster or slower from minute to minute, and by one lap it would be compared with luck.

What is scored is a lap: the load from its begin, the same in every lap of a round but for the words, so that nobody
finds another's prompts in the prefix cache. A static setting runs one, the tuner one after another: a minute of a load
is not like the next, since short requests end first and long ones gather. The lines of memory are kept alike: under
static settings all that steers throughput is pinned, and the tuner may move the lines to where they are measured.

Goodput is what `Worth` makes of prompts and answers, by one list of prices for all runs of a load, simulated and live;
`written` is what came out as answers in that stretch.
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autotune.space import HARD_LINE, WATERMARK, Space
from autotune.whatif import Calibration
from autotune.worth import Worth
from engine.budget import Limits
from tests.perf.harness import Findings
from tests.perf.live_load import Load, Ran, calibrated, drive, like, limits_of, priced, simulated, steer, together
from tests.perf.served import Served, serving

MEMORY = "1200MiB"
PROMISE = (
    "≥ 95 % of the best static setting, ≥ 1.5 × the median of the grid's worst quartile; ≤ 1 % of the time above the "
    "watermark, never past 85 %; the load counts if best ÷ that median ≥ 1.6"
)
TOO_EVEN = "best ÷ worst quartile is below 1.6: this load does not count"
_PINNED = ("max_num_seqs", "prefill_chunk", "max_num_batched_tokens", "max_partial_prefills", "context_limit")
_BEST = 3  # measured again, in each round
_ROUNDS = 3
_SPREAD = (7, 13, 18, 20, 23)  # ranks, from 0, of the others that run live
_WORST = 18  # the first rank of the worst quartile of 24
_ABOVE = 0.01  # of the time may be spent above the watermark


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of the runs. A lap is scored once it is warm; of the tuner's, so many in the end. `around`: whether a
    round measures the best after the tuner, too."""

    calibrating_s: float = 30.0
    warm_s: float = 15.0
    scored_s: float = 45.0
    laps: int = 6
    scored_laps: int = 3
    around: bool = True
    simulated_s: float = 480.0


QUICK = Times(calibrating_s=6.0, warm_s=3.0, scored_s=6.0, laps=2, scored_laps=1, simulated_s=12.0)


def grid(known: Calibration, start: Limits) -> list[Limits]:
    """24 settings: rows × tokens of a step, from far too few to the ceilings; the two that people set elsewhere, where
    prompts take as much of a step as is free."""
    ceiling = known.resolved.ceilings()
    rows = sorted({max(1, ceiling["max_num_seqs"] * share // 64) for share in (1, 4, 16, 64)})
    steps = sorted({max(16, ceiling["max_num_batched_tokens"] * share // 32) for share in (1, 2, 4, 8, 16, 32)})
    return [
        start.replaced({"max_num_seqs": n, "max_num_batched_tokens": t, "prefill_chunk": t})
        for n, t in itertools.product(rows, steps)
    ]


def name_of(limits: Limits) -> str:
    return f"{limits.max_num_seqs} rows, chunks of {limits.prefill_chunk} in steps of {limits.max_num_batched_tokens}"


def put(served: Served, limits: Limits) -> None:
    """Set the limits by hand; so they are pinned, all but the lines of memory."""
    values = {name: getattr(limits, name) for name in _PINNED}
    steer(served, set=values, why="a measurement")


def row(setting: str, ran: Ran, from_s: float, prices: Worth | None = None, **more: Any) -> dict[str, Any]:
    """What a run came to; without prices, tokens of answers are all that counts."""
    written = ran.written_per_s(from_s)
    return {
        "setting": setting,
        "goodput": prices.rate(ran.windows(from_s)) if prices else written,
        "written": written,
        "above_watermark": ran.above(WATERMARK),
        "peak_in_use": max((used for _, used in ran.in_use), default=0.0),
        **more,
    }


@contextmanager
def engine(quick: bool, memory: str = MEMORY) -> Iterator[Served]:
    """The default model; the quick form goes through everything with a tiny one."""
    if not quick:
        with serving("--memory-limit", memory) as served:
            yield served
        return
    from tests.fakes.tiny_served import tiny_model

    with (
        TemporaryDirectory(prefix="inferd-perf-") as folder,
        serving("--memory-limit", "600MiB", model=str(tiny_model(Path(folder)))) as served,
    ):
        yield served


class Bench:
    """Static settings on one daemon, and the tuner on fresh ones."""

    def __init__(self, served: Served, load: Load, times: Times, quick: bool, memory: str) -> None:
        self._memory = memory
        self._served, self._load, self._times, self._quick = served, load, times, quick
        self._texts = itertools.count(1000)
        self.begun = limits_of(served)
        put(served, self.begun)
        self.runs: list[dict[str, Any]] = []
        self._prices: Worth | None = None

    def ranked(self) -> tuple[Calibration, list[Limits]]:
        """The grid, best first, by the simulator. By one number of rows it would not know what others cost."""
        for rows in (max(1, self.begun.max_num_seqs // 32), self.begun.max_num_seqs):
            put(self._served, self.begun.replaced({"max_num_seqs": rows}))
            seconds, last = self._times.calibrating_s, rows == self.begun.max_num_seqs
            seen = drive(self._served, self._load, seconds, next(self._texts), whole=last)
        known = calibrated(self._served)
        longest = known.resolved.max_model_len
        self._prices = prices = priced(known, like(self._load, longest, seen.served), together(seen))
        forecasts = []
        for limits in grid(known, limits_of(self._served)):
            traffic, seconds = like(self._load, longest, seen.served), self._times.simulated_s
            periods = simulated(known, limits, traffic, seconds, seconds / 4).periods
            forecasts.append((prices.rate([window for at_s, _, window in periods if at_s > seconds / 4]), limits))
        forecasts.sort(key=lambda forecast: -forecast[0])
        for rank, (goodput, limits) in enumerate(forecasts):
            self.runs.append({"setting": name_of(limits), "rank": rank, "simulated": goodput})
            print(f"simulated {rank}: {name_of(limits)}: {goodput:.1f} tokens/s", flush=True)
        return known, [limits for _, limits in forecasts]

    def static(self, limits: Limits, round: int) -> dict[str, Any]:
        """What these limits come to."""
        put(self._served, limits)
        self._keep(self._lap(self._served, name_of(limits), round))
        return self.runs[-1]

    def tuned(self, round: int) -> dict[str, Any]:
        """What the tuner came to, and everything that it did."""
        times = self._times
        with engine(self._quick, self._memory) as served:
            began_ns = time.monotonic_ns()
            laps = [self._lap(served, "the tuner", round) for _ in range(times.laps)]
            decisions = [d for d in served.snapshot("decisions")["decisions"] if d["at_ns"] >= began_ns]
            limits = name_of(limits_of(served))
        scored = laps[-times.scored_laps :]
        self._keep(
            {
                "setting": "the tuner",
                **{name: statistics.fmean(lap[name] for lap in scored) for name in ("goodput", "written")},
                "above_watermark": statistics.fmean(lap["above_watermark"] for lap in laps),
                "peak_in_use": max(lap["peak_in_use"] for lap in laps),
                "round": round,
                "ended_with": limits,
                "laps": [lap["goodput"] for lap in laps],
                "decisions": decisions,
            }
        )
        return self.runs[-1]

    def _lap(self, served: Served, setting: str, round: int) -> dict[str, Any]:
        times, load = self._times, replace(self._load, seed=self._load.seed + 100 * round)
        ran = drive(served, load, times.warm_s + times.scored_s, next(self._texts), whole=False)
        return row(setting, ran, times.warm_s, self._prices, round=round)

    def _keep(self, found: dict[str, Any]) -> None:
        self.runs.append(found)
        laps = "; ".join(f"{lap:.1f}" for lap in found.get("laps", ()))
        said = f", laps of {laps}, ends with {found['ended_with']}" if laps else ""
        print(
            f"round {found['round']}: {found['setting']}: {found['goodput']:.1f} tokens/s ({found['written']:.1f} "
            f"written), {found['peak_in_use']:.1%} in use at most{said}",
            flush=True,
        )


def measured(load: Load, quick: bool, times: Times | None = None, memory: str = MEMORY) -> Findings:
    """One load, with so much `memory` that it binds."""
    times = QUICK if quick else times or Times()
    with engine(quick, memory) as served:
        bench = Bench(served, load, times, quick, memory)
        known, ranked = bench.ranked()
        best, spread = ranked[:_BEST], [rank for rank in _SPREAD if rank < len(ranked)]
        if quick:
            best, spread = best[:1], spread[-1:]
        first = {rank: bench.static(ranked[rank], 0) for rank in (*range(len(best)), *spread)}
        again: dict[str, list[dict[str, Any]]] = {name_of(limits): [] for limits in best}
        tuned = []
        for round in range(1, 2 if quick else 1 + _ROUNDS):
            for limits in best:
                again[name_of(limits)].append(bench.static(limits, round))
            tuned.append(bench.tuned(round))
            for limits in reversed(best) if times.around else ():
                again[name_of(limits)].append(bench.static(limits, round))
    worst = _median([run for rank, run in first.items() if rank >= min(_WORST, len(ranked) - 1)])
    return _judged(bench.runs, tuned, again, worst, Space.of(known.resolved).unreachable(), load)


def _median(runs: list[dict[str, Any]]) -> float:
    return float(statistics.median([run["goodput"] for run in runs]))


def _judged(
    runs: list[dict[str, Any]],
    tuned: list[dict[str, Any]],
    again: dict[str, list[dict[str, Any]]],
    worst: float,
    trouble: str,
    load: Load,
) -> Findings:
    best, reached = max(map(_median, again.values())), _median(tuned)
    above, peak = statistics.fmean(run["above_watermark"] for run in tuned), max(run["peak_in_use"] for run in tuned)
    binds = best / worst if worst else float("inf")
    counts = binds >= 1.6
    held = reached >= 0.95 * best and reached >= 1.5 * worst and above <= _ABOVE and peak <= HARD_LINE
    return Findings(
        runs=runs,
        summary={
            **{name: f"{_median(found):.1f} tokens/s" for name, found in again.items()},
            "worst quartile's median": f"{worst:.1f} tokens/s",
            "best ÷ worst quartile": round(binds, 2),
            "the tuner": f"{reached:.1f} tokens/s",
            "the tuner ÷ best": f"{reached / best:.1%}",
            "the tuner, above the watermark": f"{above:.1%} of the time",
            "the tuner, most in use": f"{peak:.1%}",
            "the tuner's decisions": ", ".join(str(len(run["decisions"])) for run in tuned),
            "ended with": "; ".join(run["ended_with"] for run in tuned),
        },
        met=held if counts else None,
        seeds=[load.seed],
        notes=[note for note in ("" if counts else TOO_EVEN, trouble) if note],
    )
