"""Does it hold for days? A soak's phase judged by its time series: what drifts, what was refused, what went too far.

Owns what is looked at, from when on, and how much drift matters. Averages are not asked: a server that loses 1 % an
hour has a good average. Pure. Enter at `judged`.
"""

from collections.abc import Sequence
from typing import Final

from autotune.space import HARD_LINE, WATERMARK
from daemon.lab import stats
from daemon.lab.panels import readable, seconds
from daemon.lab.record import Run, Series, Verdict

# Owners that are meant to change with the load; and what others hold.
_MOVING: Final = ("kv_active", "kv_cached", "kv_free", "headroom", "neighbours", "in use", "allocator_cache")
_WARM_UP: Final = 0.25  # of a phase is not judged: pools fill, caches warm up
_LEAST_BYTES = 8 << 20  # drift below this is nothing
_BYTES_SHARE = 0.01  # or below this share of the limit
_SPEED_SHARE = 0.25  # of its level that a latency or rate may drift
_QUEUE_SHARE = 0.25  # of the requests under way that the queue may grow by
_FAILED_SHARE = 0.01
_HOUR_S = 3600.0


def judged(run: Run, concurrency: int) -> list[Verdict]:
    """Every judgement of one phase."""
    found = [_memory(run, series) for series in run.series if _is_owner(series.name)]
    kinds = sorted({request.kind for request in run.requests})
    for kind in kinds:
        found += [
            _latency(run, kind, "ttft_s", "time to first token"),
            _latency(run, kind, "gap_s", "gap between tokens"),
        ]
    found += [_queue(run, concurrency), _throughput(run), _refusals(run), _hard_line(run)]
    return [Verdict(name=f"{run.side}: {v.name}", passed=v.passed, why=v.why) for v in found]


def _is_owner(name: str) -> bool:
    group, _, owner = name.partition(".")
    return name == "process.daemon" or (group == "memory" and owner not in _MOVING)


def _late(points: Sequence[tuple[float, float | None]], run: Run) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if y is not None and x >= run.seconds * _WARM_UP]


def _trend(run: Run, name: str) -> stats.Trend | None:
    series = next((series for series in run.series if series.name == name), None)
    return stats.trend(_late(list(zip(series.at_s, series.values, strict=True)), run)) if series else None


def _short(name: str, found: bool = True) -> Verdict:
    why = "too few samples for a slope: longer phases (--phase-seconds)" if found else "nobody reported it"
    return Verdict(name=name, passed=None, why=why)


def _memory(run: Run, series: Series) -> Verdict:
    name = f"memory of {series.name.partition('.')[2]}"
    trend = _trend(run, series.name)
    if trend is None:
        return _short(name)
    allowed = max(_LEAST_BYTES, _BYTES_SHARE * (run.limit_bytes or 0))
    grows = trend.certain and trend.drift > allowed
    an_hour = readable(trend.slope * _HOUR_S)
    why = f"{readable(trend.level)}, {an_hour} an hour" + (
        f": more than {readable(allowed)} in {trend.seconds:.0f} s" if grows else ""
    )
    if grows and run.limit_bytes and trend.slope > 0:
        why += f"; the rest of the limit is gone in {(run.limit_bytes - trend.level) / trend.slope / _HOUR_S:.1f} h"
    return Verdict(name=name, passed=not grows, why=why)


def _latency(run: Run, kind: str, figure: str, name: str) -> Verdict:
    title = f"{name}, {kind} requests"
    points = [(r.at_s, getattr(r, figure)) for r in run.requests if r.kind == kind and not r.error]
    trend = stats.trend(_late(points, run))
    if trend is None:
        return _short(title)
    grows = trend.certain and trend.drift > _SPEED_SHARE * trend.level
    return Verdict(
        name=title,
        passed=not grows,
        why=f"median {seconds(trend.level)}, {trend.drift / trend.level:+.0%} over {trend.seconds:.0f} s"
        + ("" if trend.certain else ", which may be none"),
    )


def _queue(run: Run, concurrency: int) -> Verdict:
    name = "queue"
    trend = _trend(run, "queue.waiting")
    if trend is None:
        return _short(name)
    grows = trend.certain and trend.drift > max(2.0, _QUEUE_SHARE * concurrency)
    return Verdict(
        name=name, passed=not grows, why=f"{trend.level:.0f} wait, {trend.drift:+.1f} in {trend.seconds:.0f} s"
    )


def _throughput(run: Run) -> Verdict:
    name = "throughput"
    trend = _trend(run, "rate.decode")
    if trend is None or trend.level <= 0:
        return _short(name)
    falls = trend.certain and -trend.drift > _SPEED_SHARE * trend.level
    why = f"median {trend.level:.1f} tokens/s, {trend.drift / trend.level:+.0%} over {trend.seconds:.0f} s"
    return Verdict(name=name, passed=not falls, why=why)


def _refusals(run: Run) -> Verdict:
    failed = sum(bool(request.error) for request in run.requests)
    if not run.requests:
        return Verdict(name="answers", passed=False, why="no request ended")
    share = failed / len(run.requests)
    return Verdict(name="answers", passed=share <= _FAILED_SHARE, why=f"{failed} of {len(run.requests)} failed")


def _hard_line(run: Run) -> Verdict:
    name = "memory in use"
    series = next((series for series in run.series if series.name == "memory.in use"), None)
    known = [value for value in series.values if value is not None] if series else []
    if not known or not run.limit_bytes:
        return Verdict(name=name, passed=None, why="nobody reported it, or there is no limit")
    most = max(known) / run.limit_bytes
    above = sum(value > WATERMARK * run.limit_bytes for value in known) / len(known)
    why = f"at most {most:.0%} of the limit; above the watermark {above:.0%} of the time"
    return Verdict(name=name, passed=most <= HARD_LINE, why=f"{why}; the hard line is {HARD_LINE:.0%}")
