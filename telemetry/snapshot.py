"""Snapshot: everything known at one instant, as one value, by the parts that were asked for.

Owns which parts there are (their shapes are in parts.py), and how each is built from the fold and from what others hand
in (`Views`). TUI, doctor, tuner and operator read it. It must not know HTTP or the engine's types. Enter at `build`;
`encode`/`decode` are its JSON.

Every part is None when it was not asked for or is not reported, and so is every figure that nobody knows: watching
somebody else's server fills in less, never something else.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from telemetry import events
from telemetry.fold import Fold
from telemetry.ladder import ladder
from telemetry.parts import (
    KvView,
    LatencyView,
    MemoryView,
    Part,
    Percentiles,
    QueueView,
    RequestsView,
    Sample,
    StateView,
    TimeBreakdown,
    TotalsView,
)
from telemetry.state import State

FINISHED_SHOWN = 32
STEPS_SHOWN = 60
POINTS: Final = (50.0, 90.0, 95.0, 99.0)


class Snapshot(Part, frozen=True, kw_only=True):
    """The state at `at_ns` (monotonic) = `unix_seconds`. Each part is in `PARTS` under its own name."""

    at_ns: int
    unix_seconds: float
    model: str
    state: StateView | None = None
    limits: events.LimitsView | None = None
    ceilings: dict[str, Any] | None = None  # what was resolved at start
    reasons: dict[str, str] | None = None  # why, by the same names
    latency: LatencyView | None = None
    time_breakdown: TimeBreakdown | None = None
    queue: QueueView | None = None
    totals: TotalsView | None = None
    requests: RequestsView | None = None
    kv: KvView | None = None
    memory: MemoryView | None = None
    steps: list[events.StepReport] | None = None  # newest last
    sizes: dict[str, dict[str, int]] | None = None
    history: list[Sample] | None = None  # oldest first
    findings: list[events.Finding] | None = None  # those that hold now
    decisions: list[events.Decision] | None = None
    missed_targets: dict[str, str] | None = None  # of latency, each with its reason
    incidents: list[events.Incident] | None = None
    versions: dict[str, str] | None = None
    config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """What the fold cannot know and the composer of a snapshot hands in; None is 'not reported'."""

    engine_state: str | None = None
    engine_why: str | None = None
    live_requests: Iterable[Mapping[str, Any]] | None = None  # keys of events.RequestView; others are ignored
    block_map: bytes | None = None
    engine_memory: Mapping[str, Any] | None = None  # its answer to 'memory': for an account of it
    latency_seconds: int = 0  # of how long latencies and rates are; 0 = the fold's whole window
    whole: bool = False  # every step and record that is kept, not only the newest
    daemon_resident_bytes: int | None = None
    daemon_sizes: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] | None = None
    versions: Mapping[str, str] | None = None
    config: Mapping[str, Any] | None = None
    history: Iterable[Sample] | None = None
    state_dir: str | None = None
    daemon_pid: int | None = None
    engine_pid: int | None = None  # also of one that is not ready yet
    wall: Callable[[], float] = time.time


def build(fold: Fold, include: Iterable[str] | None = None, views: Views | None = None) -> Snapshot:
    """A snapshot of the parts in `include` (None = all). Raises ValueError for a part that does not exist."""
    asked = list(PARTS) if include is None else list(include)
    unknown = sorted(set(asked) - set(PARTS))
    if unknown:
        raise ValueError(f"no such part: {', '.join(unknown)} (there are: {', '.join(PARTS)})")
    given = views or Views()
    with fold.reading() as state:
        now_ns = fold.clock()
        parts = {name: PARTS[name](state, now_ns, given) for name in asked}
        return Snapshot(at_ns=now_ns, unix_seconds=given.wall(), model=state.model, **parts)


def encode(snapshot: Snapshot) -> bytes:
    """JSON; bytes are base64."""
    return msgspec.json.encode(snapshot)


def decode(data: bytes) -> Snapshot:
    """What `encode` wrote, also by another version: unknown fields are ignored. Raises msgspec.DecodeError."""
    return msgspec.json.decode(data, type=Snapshot)


def _age(now_ns: int, at_ns: int | None) -> int | None:
    return None if at_ns is None else max(0, now_ns - at_ns)


def _state(state: State, now_ns: int, views: Views) -> StateView:
    started, ended, status, life = state.started, state.ended, state.status, state.lifecycle
    return StateView(
        daemon=life.state if life else None,
        daemon_why=life.why if life else None,
        daemon_age_ns=_age(now_ns, life.at_ns if life else None),
        daemon_pid=views.daemon_pid,
        state_dir=views.state_dir,
        engine=views.engine_state or (ended.cause if ended else status.state if status else None),
        engine_why=views.engine_why or (ended.detail if ended else None),
        engine_id=started.engine_id if started else None,
        engine_pid=views.engine_pid or (started.pid if started and not ended else None),
        restarts=started.restarts if started else None,
        progress_age_ns=_age(now_ns, state.progress_ns),
        report_age_ns=_age(now_ns, status.at_ns if status else None),
        start_phases=started.phases if started else None,
    )


def _percentiles(state: State, now_ns: int, name: str, seconds: int) -> Percentiles:
    count, found = state.window.percentiles(now_ns, name, POINTS, seconds)
    return Percentiles(count=count, **{f"p{point:.0f}": value for point, value in zip(POINTS, found, strict=False)})


def _latency(state: State, now_ns: int, views: Views) -> LatencyView:
    last = views.latency_seconds
    seconds, sums = state.window.span_seconds(now_ns, last), state.window.sums(now_ns, last)
    return LatencyView(
        window_seconds=last or state.window.seconds,
        ttft=_percentiles(state, now_ns, "ttft", last),
        inter_token=_percentiles(state, now_ns, "gap", last),
        e2e=_percentiles(state, now_ns, "e2e", last),
        output_tokens_per_second=sums.get("output_tokens", 0.0) / seconds,
        prefill_tokens_per_second=sums.get("prefill_tokens", 0.0) / seconds,
        requests_per_second=sums.get("requests", 0.0) / seconds,
        steps_per_second=sums.get("steps", 0.0) / seconds,
        loop_lag={loop: _percentiles(state, now_ns, f"lag.{loop}", last) for loop in events.LOOPS},
    )


def _shares(sums: Mapping[str, float], prefix: str) -> tuple[dict[str, float], float]:
    picked = {name.removeprefix(prefix): amount for name, amount in sums.items() if name.startswith(prefix)}
    total = sum(picked.values())
    return {name: amount / total for name, amount in picked.items() if total}, total


def _time_breakdown(state: State, now_ns: int, views: Views) -> TimeBreakdown:
    sums = state.window.sums(now_ns)
    stages, _ = _shares(sums, "stage.")
    phases, step_ns = _shares(sums, "step.")
    return TimeBreakdown(
        window_seconds=state.window.seconds,
        stages=stages,
        step_phases=phases,
        step_seconds=step_ns / 1e9,
        step_cost=(state.status.step_cost or None) if state.status else None,
    )


def _queue(state: State, now_ns: int, views: Views) -> QueueView:
    queue = state.queue
    return QueueView(
        running=queue.running,
        waiting=queue.waiting,
        preempted=queue.preempted,
        waiting_capacity=queue.capacity,
        waiting_kv=queue.kv,
        waiting_budget=queue.budget,
    )


def _totals(state: State, now_ns: int, views: Views) -> TotalsView:
    return TotalsView(
        finished=dict(state.finished),
        prompt_tokens=state.prompt_tokens,
        cached_prompt_tokens=state.cached_prompt_tokens,
        output_tokens=state.output_tokens,
        preemptions=dict(state.preemptions),
        preempted_tokens=dict(state.preempted_tokens),
        restarts=dict(state.restarts),
        step_tokens=dict(state.step_tokens),
        telemetry_dropped={**views.dropped, "engine": state.engine_dropped} if views.dropped is not None else None,
    )


def _requests(state: State, now_ns: int, views: Views) -> RequestsView:
    known = set(events.RequestView.__struct_fields__)
    live = None
    if views.live_requests is not None:
        live = [
            msgspec.convert({key: value for key, value in each.items() if key in known}, events.RequestView)
            for each in views.live_requests
        ]
    newest = list(state.records.values())[::-1]
    if not views.whole:
        newest = newest[:FINISHED_SHOWN]
    return RequestsView(live=live, finished=newest)


def _kv(state: State, now_ns: int, views: Views) -> KvView:
    blocks = state.blocks
    resolved = state.started.resolved if state.started else {}
    size = resolved.get("block_size")
    slots = blocks.active * size if blocks and size else 0
    return KvView(
        active=blocks.active if blocks else None,
        cached=blocks.cached if blocks else None,
        free=blocks.free if blocks else None,
        block_size=size,
        block_bytes=resolved.get("kv_block_bytes"),
        tail_ratio=blocks.tail_slots / slots if blocks and slots else None,
        stranded_ratio=blocks.stranded / blocks.total if blocks and blocks.total else None,
        hit_tokens=state.prefix["hit"],
        miss_tokens=state.prefix["miss"],
        too_short_tokens=state.prefix["too_short"],
        block_map=views.block_map,
    )


def _memory(state: State, now_ns: int, views: Views) -> MemoryView:
    resolved = state.started.resolved if state.started else {}
    blocks, block_bytes = resolved.get("kv_blocks"), resolved.get("kv_block_bytes")
    known = ladder(state)
    return MemoryView(
        device=known.device if known else None,
        limit_bytes=known.limit_bytes if known else None,
        owners=known.owners if known else None,
        source=known.source if known else None,
        used_bytes=known.used_bytes if known else None,
        reserved_bytes=known.reserved_bytes if known else None,
        weights_bytes=resolved.get("weights_bytes"),
        pool_bytes=blocks * block_bytes if blocks and block_bytes else None,
        engine_resident_bytes=state.status.rss_bytes or None if state.status else None,
        daemon_resident_bytes=views.daemon_resident_bytes,
        booked={name: report.booked for name, report in state.memory.items()} or None,
        measured={name: report.measured for name, report in state.memory.items()} or None,
    )


def _sizes(state: State, now_ns: int, views: Views) -> dict[str, dict[str, int]]:
    sizes = {"daemon": dict(views.daemon_sizes)}
    if state.status is not None:
        sizes["engine"] = state.status.sizes
    return sizes


# Each part's builder, by its name in Snapshot and in `?include=`.
PARTS: Final[Mapping[str, Callable[[State, int, Views], Any]]] = {
    "state": _state,
    "limits": lambda state, now_ns, views: state.limits,
    "ceilings": lambda state, now_ns, views: state.started.resolved if state.started else None,
    "reasons": lambda state, now_ns, views: state.started.reasons if state.started else None,
    "latency": _latency,
    "time_breakdown": _time_breakdown,
    "queue": _queue,
    "totals": _totals,
    "requests": _requests,
    "kv": _kv,
    "memory": _memory,
    "steps": lambda state, now_ns, views: list(state.steps)[0 if views.whole else -STEPS_SHOWN :],
    "sizes": _sizes,
    "findings": lambda state, now_ns, views: list(state.findings.values()),
    "history": lambda state, now_ns, views: list(views.history) if views.history is not None else None,
    "decisions": lambda state, now_ns, views: list(state.decisions),
    "missed_targets": lambda state, now_ns, views: state.missed_targets,
    "incidents": lambda state, now_ns, views: list(state.incidents),
    "versions": lambda state, now_ns, views: dict(views.versions) if views.versions is not None else None,
    "config": lambda state, now_ns, views: dict(views.config) if views.config is not None else None,
}
