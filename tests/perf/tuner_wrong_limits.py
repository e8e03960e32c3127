"""Limits eight times too high and too low: what the tuner makes of them within five minutes of load."""

import statistics
from dataclasses import asdict, replace
from typing import Any

from autotune.workload import MIXES
from engine.budget import Limits
from tests.perf.harness import Findings
from tests.perf.live_load import Load, calibrated, drive, like, limits_of, priced, steer, together
from tests.perf.served import Served
from tests.perf.tuner_grid import MEMORY, engine, name_of, put, row

TITLE = f"Limits eight times too high or too low: short prompts, 48 users, {MEMORY}"
PROMISE = "after 5 minutes of load ≥ 95 % of what the limits give that the tuner found from the default ones"
LOAD = Load(mix=MIXES["short"], seed=21, users=48)
KNOBS = ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "max_partial_prefills")
FACTORS = {"8 × too low": 0.125, "8 × too high": 8.0}


TUNING_S, WARM_S, SCORED_S = 300.0, 15.0, 45.0
FOUND, GOOD = "what was found", "the good ones"
TURNS = (FOUND, GOOD, GOOD, FOUND, FOUND, GOOD)


def run(quick: bool) -> Findings:
    """Each on a daemon of its own. What the tuner has made of wrong limits by then is compared with the good ones on
    the same daemon, in turns, each over the same lap from the begin of the load, but for the words: the first minutes
    of a load give more than the sixth, and a machine is a tenth faster or slower from minute to minute."""
    tuning_s, warm_s, scored_s = (8.0, 3.0, 4.0) if quick else (TUNING_S, WARM_S, SCORED_S)
    turns = TURNS[:2] if quick else TURNS
    runs: list[dict[str, Any]] = []
    shares: dict[str, float] = {}
    known: Limits | None = None
    ceilings: dict[str, int] = {}
    for name in ("from the defaults", *FACTORS):
        with engine(quick) as served:
            if known is not None:
                _spoil(served, known, FACTORS[name], ceilings)
            began = limits_of(served)
            ran = drive(served, LOAD, tuning_s, whole=False)
            found, decisions = limits_of(served), served.snapshot("decisions")["decisions"]
            more = {"began_with": asdict(began), "ended_with": asdict(found), "decisions": decisions}
            runs.append(row(name, ran, 0.8 * tuning_s, **more))
            print(f"{name}: {runs[-1]['written']:.1f} tokens/s in the end, with {name_of(found)}", flush=True)
            cost = calibrated(served)
            if known is None:
                known, ceilings = found, cost.resolved.ceilings()
                continue
            prices = priced(cost, like(LOAD, cost.resolved.max_model_len, ran.served), together(ran))
            sides: dict[str, list[float]] = {FOUND: [], GOOD: []}
            for turn, side in enumerate(turns):
                put(served, found if side == FOUND else known)
                lap = replace(LOAD, seed=LOAD.seed + 1)
                ran = drive(served, lap, warm_s + scored_s, 1000 + turn, whole=False)
                runs.append(row(f"{name}: {side}", ran, warm_s, prices, turn=turn))
                sides[side].append(runs[-1]["goodput"])
                print(f"  {side}: {runs[-1]['goodput']:.1f} tokens/s ({runs[-1]['written']:.1f} written)", flush=True)
            medians = {side: statistics.median(laps) for side, laps in sides.items()}
            shares[name] = medians[FOUND] / medians[GOOD]
    return Findings(
        runs=runs,
        summary={
            **{
                f"{name}, laps of {side}": ", ".join(
                    f"{r['goodput']:.1f}" for r in runs if r["setting"] == f"{name}: {side}"
                )
                for name in shares
                for side in (FOUND, GOOD)
            },
            **{f"{name}, of the good ones": f"{share:.1%}" for name, share in shares.items()},
            **{f"{run['setting']}: began, ended": _ends(run) for run in runs if "ended_with" in run},
        },
        met=all(share >= 0.95 for share in shares.values()),
        seeds=[LOAD.seed, LOAD.seed + 1],
        notes=["tokens/s by one list of prices for prompts and answers; laps of 60 s, of which the last 45 are scored"],
    )


def _spoil(served: Served, known: Limits, factor: float, ceilings: dict[str, int]) -> None:
    """Limits by that factor away from the known good ones, as far as the ceilings let them; then the tuner is free."""
    wrong = {name: max(1, min(ceilings[name], round(getattr(known, name) * factor))) for name in KNOBS}
    steer(served, set=wrong, why="wrong on purpose")
    steer(served, release=True)


def _ends(run: dict[str, Any]) -> str:
    """Rows, chunks and steps at the begin and the end."""
    return f"{name_of(Limits(**run['began_with']))} → {name_of(Limits(**run['ended_with']))}"
