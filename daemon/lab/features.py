"""The features that an ablation switches off, one line each; and the sides that follow from them. Pure.

Owns the table. What a switch does is the engine's (engine/features.py, engine/device/start.py). It must not know
processes or loads. Enter at `TABLE` and `sides`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

ALL_ON, ALL_OFF = "all on", "all off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """`without` and `settings` switch it off. `whole_steps`: a step must then hold the longest prompt beside all rows
    that decode."""

    name: str
    instead: str  # what there is without it
    without: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    whole_steps: bool = False


# A feature that joins: one line here.
TABLE: Final = (
    Feature(name="continuous batching", instead="static batches", without="continuous_batching"),
    Feature(name="paged KV", instead="the longest context reserved for each request", without="paged_kv"),
    Feature(name="prefix cache", instead="every prompt computed", settings={"prefix_cache": False}),
    Feature(name="chunked prefill", instead="whole prompts", without="chunked_prefill", whole_steps=True),
    Feature(name="fast attention", instead="naive attention", without="fast_attention"),
    Feature(name="compiled kernels", instead="torch's operators", without="compiled_kernels"),
)
NAMES: Final = tuple(feature.name.replace(" ", "-").lower() for feature in TABLE)


def chosen(names: Sequence[str]) -> list[Feature]:
    """Those named, or all, in the table's order."""
    return [feature for feature, name in zip(TABLE, NAMES, strict=True) if not names or name in names]


def settings_without(off: Sequence[Feature], base: dict[str, Any]) -> dict[str, Any]:
    """The settings of a side. `base` has `max_model_len` and `max_num_seqs`."""
    made = dict(base)
    for feature in off:
        made |= feature.settings
    made["without"] = tuple(feature.without for feature in off if feature.without)
    if any(feature.whole_steps for feature in off):
        made["max_num_batched_tokens"] = base["max_model_len"] + base["max_num_seqs"]
    return made


def sides(features: Sequence[Feature], alone: bool, base: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name → settings: all on; all but one; with `alone`, none but one; none."""
    made = {ALL_ON: settings_without([], base)}
    made |= {f"{one.name} off": settings_without([one], base) for one in features}
    if len(features) > 1:
        if alone:
            for one in features:
                others = [other for other in features if other is not one]
                made[f"{one.name} alone"] = settings_without(others, base)
        made[ALL_OFF] = settings_without(features, base)
    return made


def against(side: str) -> str:
    """What a side is compared with: a feature that is on alone with none, all others with all."""
    return ALL_OFF if side.endswith(" alone") else ALL_ON
