"""Head sampling: whether a request's trace is kept, decided once, when the request arrives.

Owns the reading of OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG, as OpenTelemetry's SDK configuration defines them.
The decision travels with the request: its record, exemplars and the caller's response agree about it. It needs no SDK.
Enter at `Head.decide`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

_RATIOS = {"always_on": 1.0, "always_off": 0.0, "traceidratio": None}  # None: the argument says it
_LOW_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Head:
    """Keeps `ratio` of the traces, by trace id alone, so that every service that sees a trace decides the same;
    `parent_based`: a caller's decision is followed instead."""

    ratio: float = 1.0
    parent_based: bool = True

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Head":
        """What the variables ask for; something that is no sampler is said, and the default is used."""
        name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
        kind = name.removeprefix("parentbased_")
        if kind not in _RATIOS:
            log.warning("OTEL_TRACES_SAMPLER=%s is not served: parentbased_always_on is used", name)
            return cls()
        ratio = _RATIOS[kind]
        return cls(_argument(environ) if ratio is None else ratio, parent_based=kind != name)

    def decide(self, trace_id: str, parent: bool | None) -> bool:
        """`trace_id`: 32 hex digits. `parent`: the caller's decision, None without a caller."""
        if parent is not None and self.parent_based:
            return parent
        return int(trace_id, 16) & _LOW_64 < round(self.ratio * (1 << 64))


def _argument(environ: Mapping[str, str]) -> float:
    given = environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip()
    try:
        ratio = float(given) if given else 1.0
    except ValueError:
        ratio = -1.0
    if 0.0 <= ratio <= 1.0:
        return ratio
    log.warning("OTEL_TRACES_SAMPLER_ARG=%s is no number from 0 to 1: every trace is kept", given)
    return 1.0
