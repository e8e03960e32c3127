"""Metric: one row of the exposition, declared whole: name, type, help, labels with their closed values, buckets,
reader.

Owns the row type, what a reader may see (`View`) and the shorthands that readers share. It must not know Prometheus.
Enter at `Metric`; the rows are in `telemetry/metrics/`, each module a tuple `ROWS`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from telemetry.state import State
from telemetry.stats import Histogram

# A label whose values come from our own code or configuration rather than from a fixed set; their number is capped.
OPEN: Final = None
OPEN_VALUES: Final = 64

Kind = Literal["counter", "gauge", "histogram"]
Reading = tuple[tuple[str, ...], float | Histogram]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What a scrape asks at once instead of learning it from events. `None` is 'not reported'."""

    dropped: Mapping[str, int] = field(default_factory=dict)  # events lost, by sink
    sizes: Mapping[str, int] = field(default_factory=dict)  # entries, by queue or map of the daemon
    resident_bytes: int | None = None
    cpu_seconds: float | None = None
    pressure_us: tuple[int, int] | None = None  # (some, full) time stalled for memory
    row_errors: int = 0
    progress_age_ns: int | None = None  # since the engine last said that it moves


@dataclass(frozen=True, slots=True)
class View:
    """What a reader sees: the fold's state, the present, and what was asked outside."""

    state: State
    now_ns: int
    outside: Outside
    build: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. `read` is pure and gives (label values, number or histogram) per series; none while its owner does
    not exist. `labels` maps a label to its values, or to OPEN. Every series also has `model` and `engine`."""

    name: str
    kind: Kind
    help: str
    read: Callable[[View], Iterable[Reading]]
    labels: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    legacy: bool = False  # an older name, served only if asked for


def one(value: float | Histogram | None) -> list[Reading]:
    """A series without labels of its own, or none if the value is not reported."""
    return [] if value is None else [((), value)]


def each(values: Mapping[str, int] | Mapping[str, float] | Mapping[str, Histogram]) -> list[Reading]:
    """A series per key."""
    return [((name,), value) for name, value in values.items()]


def unowned(view: View) -> list[Reading]:
    """No series yet: the name is registered (HELP and TYPE), and its owner comes later."""
    return []
