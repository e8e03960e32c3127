"""Where the simulator's figures of this machine come from: a running daemon, or what the tuner learned of the last.

Owns the reading of both. It must not know simulations. Enter at `calibration`.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from autotune.memory import Memory
from autotune.whatif import Calibration, fitted
from engine.budget import Limits, Resolved
from engine.errors import ConfigError
from engine.stepcost import StepCost
from telemetry.client import Client, ClientError, find

_TUNER = "/inferd/v1/tuner"
_HINT = "serve some requests first, or let the tuner learn from them"


def calibration(socket: str, url: str, key: str, state_dir: Path, learned: str = "") -> Calibration:
    """Of the running daemon if there is one, with what was learned before where its last steps are too few; else of the
    entry of what was learned whose name contains `learned`. Raises ConfigError that says what to do."""
    memory = Memory(state_dir)
    if not learned:
        try:
            return _live(Client(find(socket, url, key)), memory)
        except ClientError as error:
            if socket or url or not memory.names():
                raise ConfigError(f"there is nothing to calibrate the simulator with: {error}", _HINT) from None
    names = [name for name in memory.names() if learned in name]
    if not names:
        raise ConfigError(f"nothing was learned yet in {memory.path}" + (f" for {learned!r}" if learned else ""), _HINT)
    return _known(memory, names[-1])


def _live(client: Client, memory: Memory) -> Calibration:
    snapshot = client.snapshot(["ceilings", "limits", "steps"])
    if snapshot.ceilings is None or snapshot.limits is None:
        raise ClientError("the engine is not ready, so its ceilings are not known")
    cost, error = _tuners(client)
    if cost is None:  # there is no tuner, or it has seen too little: by the last steps
        fit = fitted(snapshot.steps or [])
        cost, error = fit.cost(), fit.error_ratio
    if cost is None or not cost.prefill_s:
        names = [name for name in memory.names() if name.startswith(f"{snapshot.model}|")]
        if not names:
            raise ClientError("the daemon has not computed enough steps yet")
        return _known(memory, names[-1])
    limits = Limits(**msgspec.structs.asdict(snapshot.limits))
    return Calibration(
        resolved=_resolved(snapshot.ceilings), limits=limits, cost=cost, error=error, source=str(client.endpoint)
    )


def _tuners(client: Client) -> tuple[StepCost | None, float]:
    """What the daemon's tuner has learned of a step's cost, and its error: of far more steps than a snapshot shows."""
    status = json.loads(client.get(_TUNER))
    cost = status.get("step_cost")
    return (StepCost(**cost), status["step_cost_error"]) if cost else (None, 0.0)


def _known(memory: Memory, name: str) -> Calibration:
    learned = memory.get(name)
    cost = learned.step_cost() if learned else None
    if learned is None or cost is None or not learned.resolved:
        raise ConfigError(f"what was learned as {name} has no cost of a step", _HINT)
    resolved = _resolved(learned.resolved)
    ceilings = resolved.ceilings()
    limits = Limits(**{**ceilings, **{name: value for name, value in learned.limits.items() if name in ceilings}})
    return Calibration(
        resolved=resolved,
        limits=limits.within(resolved),
        cost=cost,
        error=learned.cost_error,
        source=f"{memory.path}: {name}",
    )


def _resolved(found: dict[str, Any]) -> Resolved:
    known = {f.name for f in fields(Resolved)}
    try:
        return Resolved(**{name: value for name, value in found.items() if name in known})
    except TypeError as error:
        raise ConfigError(f"these ceilings are of another version: {error}") from None
