"""Limits eight times too high and too low: what the tuner makes of them within five minutes of load."""

from dataclasses import asdict, replace
from typing import Any

from autotune.workload import MIXES
from engine.budget import Limits
from tests.perf.harness import Findings
from tests.perf.live_load import Load, drive, limits_of, steer
from tests.perf.served import Served
from tests.perf.tuner_grid import MEMORY, engine, name_of, row

TITLE = f"Limits eight times too high or too low: short prompts, 48 users, {MEMORY}"
PROMISE = "after 5 minutes of load ≥ 95 % of what the tuner reaches from the default limits"
LOAD = Load(mix=MIXES["short"], seed=21, users=48)
KNOBS = ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "max_partial_prefills")
FACTORS = {"8 × too low": 0.125, "8 × too high": 8.0}


def run(quick: bool) -> Findings:
    """Twice, in turn; each on a daemon of its own. The reference is where the tuner gets to from the default limits."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("from the defaults", *FACTORS)}
    known: Limits | None = None
    for round in range(1 if quick else 2):
        for name in found:
            with engine(quick) as served:
                if name in FACTORS and known is not None:
                    _spoil(served, known, FACTORS[name])
                began = limits_of(served)
                load = replace(LOAD, seed=LOAD.seed + round)
                total_s, from_s = (15.0, 8.0) if quick else (390.0, 300.0)
                ran = drive(served, load, total_s, whole=False)
                ended = limits_of(served)
                decisions = served.snapshot("decisions")["decisions"]
            known = known or ended
            more = {"began_with": asdict(began), "ended_with": asdict(ended), "decisions": decisions}
            found[name].append(row(name, ran, from_s, **more))
            print(f"{name}: {found[name][-1]['goodput']:.1f} tokens/s with {name_of(ended)}", flush=True)
    means = {name: sum(r["goodput"] for r in rows) / len(rows) for name, rows in found.items()}
    reference = means["from the defaults"]
    return Findings(
        runs=[each for rows in found.values() for each in rows],
        summary={
            **{name: f"{value:.1f} tokens/s, {value / reference:.1%}" for name, value in means.items()},
            **{f"{name}: began, ended": _ends(rows) for name, rows in found.items()},
        },
        met=all(means[name] >= 0.95 * reference for name in FACTORS),
        seeds=[LOAD.seed, LOAD.seed + 1],
        notes=["of the last 90 of 390 s, in the mean of two runs each"],
    )


def _spoil(served: Served, known: Limits, factor: float) -> None:
    """Limits by that factor away from the known good ones, as far as the ceilings let them; then the tuner is free."""
    ceilings = served.snapshot("ceilings")["ceilings"]
    wrong = {
        name: max(1, min(ceilings[name], round(getattr(known, name) * factor))) for name in KNOBS if name in ceilings
    }
    steer(served, set=wrong, why="wrong on purpose")
    steer(served, release=True)


def _ends(rows: list[dict[str, Any]]) -> str:
    """Rows and chunks at the begin and the end of each run."""
    ends = [(Limits(**each["began_with"]), Limits(**each["ended_with"])) for each in rows]
    return "; ".join(f"{name_of(began)} → {name_of(ended)}" for began, ended in ends)
