"""The start-up settings that a search may choose, and their values around what the machine decides by itself. Pure.

Owns the table. It must not know Optuna or daemons. Enter at `KNOBS` and `choices`.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

Values = Callable[[Any], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """`ceiling`: its name in what was resolved at start. `around`: the values to try, given that one."""

    setting: str
    ceiling: str
    around: Values


def _scaled(*factors: float) -> Values:
    return lambda value: sorted({max(1, int(value * factor)) for factor in factors})


def _threads(value: Any) -> list[Any]:
    cores = len(os.sched_getaffinity(0))
    return sorted({int(value), cores, max(1, cores // 2), max(1, cores - 1)})


# A knob that joins (a scheme, KV precision, graphs): one line here.
KNOBS: Final = (
    Knob(setting="block_size", ceiling="block_size", around=lambda value: sorted({8, 16, 32, 64, value})),
    Knob(setting="dtype", ceiling="dtype", around=lambda value: sorted({"float32", "bfloat16", value})),
    Knob(setting="threads", ceiling="threads", around=_threads),
    Knob(setting="max_num_seqs", ceiling="rows", around=_scaled(0.125, 0.25, 0.5, 1, 2)),
    Knob(setting="max_num_batched_tokens", ceiling="step_tokens", around=_scaled(0.25, 0.5, 1, 2, 4)),
)
NAMES: Final = tuple(knob.setting for knob in KNOBS)


def resolved(ceilings: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The knobs as the machine chose them."""
    return {knob.setting: ceilings[knob.ceiling] for knob in KNOBS if knob.setting in names}


def choices(ceilings: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, list[Any]]:
    """The values of each knob, the machine's own among them."""
    return {knob.setting: knob.around(ceilings[knob.ceiling]) for knob in KNOBS if knob.setting in names}
