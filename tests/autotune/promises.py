"""Hours of random load under the tuner, and what must be true of them whatever comes."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from autotune.objective import Targets
from autotune.online import Pace, Tuner
from autotune.simulate import Outcome, Simulation
from autotune.space import KNOBS, Space
from autotune.workload import synthetic
from engine.budget import Limits, Resolved
from engine.stepcost import StepCost
from telemetry.events import Decision
from tests.autotune.engines import COST, SLOW, begins, engine

SETTLED_S = 900.0
MOST_OVER = 0.01  # of the busy time after SETTLED_S, above the watermark, on loads that change all the time

Make = Callable[[Space, Targets, Callable[[Decision], None]], Tuner]


@dataclass
class Hour:
    """One run and what it left."""

    resolved: Resolved
    tuner: Tuner
    outcome: Outcome
    simulation: Simulation
    decisions: list[Decision] = field(default_factory=list)


def plain(space: Space, targets: Targets, publish: Callable[[Decision], None]) -> Tuner:
    return Tuner(space, targets, publish)


def hour(seed: int, make: Make = plain, seconds: float = 3600.0) -> Hour:
    """A random mix, arrival, rate, targets and start, all of the seed."""
    rng = random.Random(seed)
    resolved = engine()
    lengths = rng.choice(["short", "lognormal", "heavy", "bimodal"])
    targets = rng.choice([Targets(), Targets(ttft_s=15.0, inter_token_s=0.45)])
    rate = {"short": 0.55, "lognormal": 0.27, "heavy": 0.23, "bimodal": 0.27}[lengths] * rng.choice([0.5, 1.0, 1.4])
    arrival = rng.choice(["poisson", "bursty", "diurnal", "switching"])
    traffic = synthetic(lengths, seed=seed, arrival=arrival, rate=rate, longest=6000)
    rows = rng.choice([2, 16, 64])
    start = begins(resolved, max_num_seqs=rows, prefill_chunk=rng.choice([16, 64, 512]))
    return under(resolved, start, traffic, targets, make, seconds, seed, cost=SLOW)


def under(
    resolved: Resolved, start: Limits, traffic: object, targets: Targets, make: Make, seconds: float, seed: int = 0,
    scored_from_s: float = SETTLED_S, cost: StepCost = COST,
) -> Hour:  # fmt: skip
    decisions: list[Decision] = []
    tuner = make(Space.of(resolved), targets, decisions.append)
    simulation = Simulation(
        resolved, start, cost, traffic, targets=targets, tuner=tuner, seed=seed, scored_from_s=scored_from_s,
        max_queue=256,
    )  # type: ignore[arg-type]  # fmt: skip
    return Hour(resolved, tuner, simulation.run(seconds), simulation, decisions)


def broken(run: Hour, pace: Pace | None = None) -> list[str]:
    """Which promises this run broke."""
    pace, found = pace or Pace(), []
    space, outcome = Space.of(run.resolved), run.outcome
    if outcome.past_hard_line:
        found.append(f"past the hard line in {outcome.past_hard_line} steps")
    for at_s, limits, _ in outcome.periods:
        for name in KNOBS:
            low, high = space.bounds(name)
            if not low <= getattr(limits, name) <= high:
                found.append(f"{name}={getattr(limits, name)} at {at_s} s is outside [{low}, {high}]")
    busy = outcome.busy_s or 1.0
    if outcome.over_watermark_s > MOST_OVER * busy:
        found.append(f"above the watermark for {outcome.over_watermark_s / busy:.1%} of the time")
    hours = run.simulation.now_s / 3600
    if run.tuner.changes > pace.burst + pace.hourly * hours + 6:  # urgent ones may borrow a few
        found.append(f"{run.tuner.changes} changes in {hours:.1f} h")
    return [*found, *_undone(run), *_at_once(run)]


def _undone(run: Hour) -> list[str]:
    """After a rollback the limits are as before."""
    found = []
    for one in run.decisions:
        if one.direction == "rollback":
            after = next((limits for at_s, limits, _ in run.outcome.periods if at_s > one.at_ns / 1e9 + 1), None)
            if after is not None and getattr(after, one.knob) != one.after:
                found.append(f"{one.knob} was rolled back to {one.after}, but is {getattr(after, one.knob)}")
    return found


def _at_once(run: Hour) -> list[str]:
    """At most one change is being tried."""
    found = []
    open_trial = 0
    for decision in run.decisions:
        if not decision.verdict:
            if open_trial:
                found.append(f"decision {decision.number} was made while {open_trial} was being tried")
            open_trial = decision.number
        elif decision.number == open_trial:
            open_trial = 0
    return found
