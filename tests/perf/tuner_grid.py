"""The tuner against static limits, live, on one load: what the four tuner_grid_* scripts share; not a script itself.

Eight minutes a load: the simulator, calibrated by half a minute of the load, ranks 24 static settings; of these the two
best and three spread over the rest run live, then the tuner from the default limits for four minutes. The issue's full
protocol (the best three again, three times, interleaved with as many tuner runs of 6 to 10 minutes) takes about an hour
a load; one pass of it cannot tell a difference of five per cent from noise, and the notes say so.
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autotune.space import HARD_LINE, WATERMARK, Space
from autotune.whatif import Calibration
from engine.budget import Limits
from tests.perf.harness import Findings
from tests.perf.live_load import Load, Ran, calibrated, drive, like, limits_of, simulated, steer
from tests.perf.served import Served, serving

MEMORY = "1200MiB"
PROMISE = "≥ 95 % of the best static setting, ≥ 1.5 × the worst; ≤ 1 % above the watermark, never past 85 %"
TOO_EVEN = "best ÷ worst is below 1.6: this load does not count"
NOTE = "one live run a setting: the full protocol repeats the best three, interleaved, for about an hour"


def grid(known: Calibration, start: Limits) -> list[Limits]:
    """24 settings: rows × chunks, from far too few to the ceilings."""
    ceiling = known.resolved.ceilings()
    rows = sorted({max(1, ceiling["max_num_seqs"] * share // 64) for share in (1, 4, 8, 16, 32, 64)})
    chunks = sorted({max(16, ceiling["prefill_chunk"] * share // 32) for share in (1, 4, 12, 32)})
    return [start.replaced({"max_num_seqs": n, "prefill_chunk": c}) for n, c in itertools.product(rows, chunks)]


def chosen(ranked: list[tuple[float, Limits]]) -> list[Limits]:
    """The two best, and three spread over the rest: its best, its middle, its worst. `ranked` is best first."""
    rest = ranked[2:]
    spread = [rest[0], rest[len(rest) // 2], rest[-1]] if rest else []
    return [limits for _, limits in (*ranked[:2], *spread)]


def _set(served: Served, limits: Limits) -> None:
    values = {name: getattr(limits, name) for name in ("max_num_seqs", "prefill_chunk")}
    steer(served, set=values, why="a measurement")


def _row(name: str, ran: Ran, from_s: float, **more: Any) -> dict[str, Any]:
    return {
        "setting": name,
        "goodput": ran.tokens_per_s(from_s),
        "above_watermark": ran.above(WATERMARK),
        "peak_in_use": max((used for _, used in ran.in_use), default=0.0),
        **more,
    }


@contextmanager
def _engine(quick: bool) -> Iterator[Served]:
    """The default model; the quick form goes through everything with a tiny one."""
    if not quick:
        with serving("--memory-limit", MEMORY) as served:
            yield served
        return
    from tests.fakes.tiny_served import tiny_model

    with (
        TemporaryDirectory(prefix="inferd-perf-") as folder,
        serving("--memory-limit", "600MiB", model=str(tiny_model(Path(folder)))) as served,
    ):
        yield served


def measured(load: Load, quick: bool) -> Findings:
    """One load, in about eight minutes."""
    static_s, tuner_s, sim_s = (9.0, 15.0, 12.0) if quick else (30.0, 240.0, 120.0)
    runs: list[dict[str, Any]] = []
    with _engine(quick) as served:
        steer(served, freeze=True)
        begun = limits_of(served)
        for rows in (max(1, begun.max_num_seqs // 8), begun.max_num_seqs):  # by one number of rows none else is known
            _set(served, begun.replaced({"max_num_seqs": rows}))
            seen = drive(served, load, static_s / 1.5)
        known = calibrated(served)
        traffic = like(load, known.resolved.max_model_len, seen.served)
        ranked = []
        for limits in grid(known, begun)[:: 8 if quick else 1]:
            again = like(load, known.resolved.max_model_len, seen.served) if ranked else traffic
            ranked.append((simulated(known, limits, again, sim_s, sim_s / 3).goodput, limits))
        ranked.sort(key=lambda pair: -pair[0])
        for limits in chosen(ranked)[: 2 if quick else 5]:
            _set(served, limits)
            ran = drive(served, load, static_s)
            name = f"{limits.max_num_seqs} rows, chunks of {limits.prefill_chunk}"
            runs.append(_row(name, ran, static_s / 3))
            print(f"{name}: {runs[-1]['goodput']:.1f} tokens/s", flush=True)  # what an interrupted run leaves
        _set(served, begun)
        steer(served, release=True)
        began = time.monotonic()
        ran = drive(served, load, tuner_s)
        made = [d for d in served.snapshot("decisions")["decisions"] if d["at_ns"] / 1e9 >= began]
        tuned = _row("the tuner, from the default limits", ran, tuner_s / 2, decisions=made)
        unreachable = Space.of(known.resolved).unreachable()
    return _judged(runs, tuned, ranked, unreachable, load)


def _judged(
    statics: list[dict[str, Any]], tuned: dict[str, Any], ranked: list[tuple[float, Limits]], trouble: str, load: Load
) -> Findings:
    best = max(row["goodput"] for row in statics)
    worst = min(row["goodput"] for row in statics)  # the live one of the simulated grid's last place
    quartile = statistics.median([value for value, _ in ranked[-max(1, len(ranked) // 4) :]])
    memory_held = tuned["above_watermark"] <= 0.01 and tuned["peak_in_use"] <= HARD_LINE
    binds = best / worst if worst else float("inf")
    counts = binds >= 1.6
    reached = tuned["goodput"] >= 0.95 * best and tuned["goodput"] >= 1.5 * worst and memory_held
    return Findings(
        runs=[*statics, tuned],
        summary={
            **{row["setting"]: f"{row['goodput']:.1f} tokens/s" for row in statics},
            "the tuner": f"{tuned['goodput']:.1f} tokens/s, {tuned['goodput'] / best:.0%} of the best",
            "best ÷ worst live": round(binds, 2),
            "worst quartile, simulated (tokens/s)": round(quartile, 1),
            "tuner: above the watermark": f"{tuned['above_watermark']:.1%}",
            "tuner: most in use": f"{tuned['peak_in_use']:.1%}",
            "tuner: decisions": len(tuned["decisions"]),
        },
        met=reached if counts else None,
        seeds=[load.seed],
        notes=[note for note in (NOTE, "" if counts else TOO_EVEN, trouble) if note],
    )
