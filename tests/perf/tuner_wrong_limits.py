"""Limits eight times too high and too low: what the tuner makes of them within five minutes of load."""

from dataclasses import asdict, replace
from typing import Any

from autotune.workload import MIXES
from engine.budget import Limits
from tests.perf.harness import Findings
from tests.perf.live_load import Load, calibrated, drive, limits_of, steer
from tests.perf.served import Served
from tests.perf.tuner_grid import MEMORY, engine, name_of, put, row

TITLE = f"Limits eight times too high or too low: short prompts, 48 users, {MEMORY}"
PROMISE = "after 5 minutes of load ≥ 95 % of what the limits give that the tuner found from the default ones"
LOAD = Load(mix=MIXES["short"], seed=21, users=48)
KNOBS = ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "max_partial_prefills")
FACTORS = {"8 × too low": 0.125, "8 × too high": 8.0}


TOTAL_S, FROM_S, WARM_S = 390.0, 300.0, 30.0


def run(quick: bool) -> Findings:
    """Each on a daemon of its own. What the tuner made of wrong limits is compared with the good ones on the same
    daemon right after it: a machine's speed moves by more than a twentieth in half an hour."""
    total_s, from_s, warm_s = (15.0, 8.0, 3.0) if quick else (TOTAL_S, FROM_S, WARM_S)
    runs: list[dict[str, Any]] = []
    shares: dict[str, float] = {}
    known: Limits | None = None
    ceilings: dict[str, int] = {}
    for name in ("from the defaults", *FACTORS):
        with engine(quick) as served:
            if known is not None:
                _spoil(served, known, FACTORS[name], ceilings)
            began = limits_of(served)
            ran = drive(served, LOAD, total_s, whole=False)
            ended, decisions = limits_of(served), served.snapshot("decisions")["decisions"]
            more = {"began_with": asdict(began), "ended_with": asdict(ended), "decisions": decisions}
            runs.append(row(name, ran, from_s, **more))
            print(f"{name}: {runs[-1]['goodput']:.1f} tokens/s with {name_of(ended)}", flush=True)
            if known is None:
                known, ceilings = ended, calibrated(served).resolved.ceilings()
                continue
            put(served, known)
            ran = drive(served, replace(LOAD, seed=LOAD.seed + 1), warm_s + total_s - from_s, whole=False)
            runs.append(row(f"{name}, then the good ones", ran, warm_s))
            shares[name] = runs[-2]["goodput"] / runs[-1]["goodput"]
            print(f"  the good ones after it: {runs[-1]['goodput']:.1f} tokens/s", flush=True)
    return Findings(
        runs=runs,
        summary={
            **{run["setting"]: f"{run['goodput']:.1f} tokens/s" for run in runs},
            **{f"{name}, of the good ones": f"{share:.1%}" for name, share in shares.items()},
            **{f"{run['setting']}: began, ended": _ends(run) for run in runs if "ended_with" in run},
        },
        met=all(share >= 0.95 for share in shares.values()),
        seeds=[LOAD.seed, LOAD.seed + 1],
        notes=["of the last 90 of 390 s, and of 90 s with the good limits after 30 s of warming up"],
    )


def _spoil(served: Served, known: Limits, factor: float, ceilings: dict[str, int]) -> None:
    """Limits by that factor away from the known good ones, as far as the ceilings let them; then the tuner is free."""
    wrong = {name: max(1, min(ceilings[name], round(getattr(known, name) * factor))) for name in KNOBS}
    steer(served, set=wrong, why="wrong on purpose")
    steer(served, release=True)


def _ends(run: dict[str, Any]) -> str:
    """Rows, chunks and steps at the begin and the end."""
    return f"{name_of(Limits(**run['began_with']))} → {name_of(Limits(**run['ended_with']))}"
