"""StepReport: how one is made of a plan, its result and the state after it, and how several become one under load.

Pure functions; it must not publish or time anything. Enter at `step_report` and `merged`.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from engine.plan import StepPlan, StepResult
from telemetry.events import Preempted, StepReport

# Fields of a merged report that are added up; every other is a gauge, of which the last is kept.
_SUMS = (
    "merged",
    "plan_ns",
    "launch_ns",
    "collect_ns",
    "commit_ns",
    "publish_ns",
    "forward_ns",
    "sample_ns",
    "prefill_rows",
    "decode_rows",
    "prefill_tokens",
    "decode_tokens",
    "recompute_tokens",
    "draft_tokens",
    "context_tokens",
    "prefix_hit_tokens",
    "prefix_miss_tokens",
    "prefix_too_short_tokens",
)
_JOINED = ("preemptions", "admitted", "finished", "rows", "gaps_us")
_MOST_NS = (2**32 - 1) * 1000  # the column is uint32 microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Stamps (monotonic ns) between the phases of one step, and how long publishing the step before took."""

    begun_ns: int
    planned_ns: int
    launched_ns: int
    collected_ns: int
    committed_ns: int
    publish_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts:
    """Pool and queue after a step."""

    running: int
    waiting: int
    preempted: int
    kv_active: int
    kv_cached: int
    kv_free: int
    kv_tail_slots: int
    kv_stranded_blocks: int


def step_report(
    plan: StepPlan,
    result: StepResult,
    times: StepTimes,
    state: StateFacts,
    *,
    finished: tuple[str, ...],
    gaps_ns: Iterable[int],
    longest_gap: tuple[int, str] = (0, ""),
    bound: str = "",
) -> StepReport:
    """Everything known of one step as one event. `longest_gap`: ns and request id."""
    why = plan.why
    rows = array("i", [number for piece in plan.slices for number in (piece.row, piece.start, piece.count)])
    fresh = [a for a in why.admitted if not a.recomputed]
    return StepReport(
        at_ns=times.begun_ns,
        step=plan.step,
        plan_ns=times.planned_ns - times.begun_ns,
        launch_ns=times.launched_ns - times.planned_ns,
        collect_ns=times.collected_ns - times.launched_ns,
        commit_ns=times.committed_ns - times.collected_ns,
        publish_ns=times.publish_ns,
        forward_ns=result.forward_ns,
        sample_ns=result.sample_ns,
        prefill_rows=why.prefill_rows,
        decode_rows=why.decode_rows,
        prefill_tokens=why.prefill_tokens,
        decode_tokens=why.decode_tokens,
        recompute_tokens=why.recompute_tokens,
        draft_tokens=why.draft_tokens,
        context_tokens=why.context_tokens,
        running=state.running,
        waiting=state.waiting,
        preempted_now=state.preempted,
        waiting_capacity=why.waiting_capacity,
        waiting_kv=why.waiting_kv,
        waiting_budget=why.waiting_budget,
        kv_active=state.kv_active,
        kv_cached=state.kv_cached,
        kv_free=state.kv_free,
        kv_tail_slots=state.kv_tail_slots,
        kv_stranded_blocks=state.kv_stranded_blocks,
        prefix_hit_tokens=sum(a.cached_tokens for a in fresh),
        prefix_miss_tokens=sum(a.missed_tokens for a in fresh),
        prefix_too_short_tokens=sum(a.too_short_tokens for a in fresh),
        preemptions=tuple(Preempted(p.request_id, p.tokens_lost, p.cause) for p in why.preempted),
        admitted=tuple((a.row, a.request_id) for a in why.admitted),
        finished=finished,
        rows=rows.tobytes(),
        gaps_us=array("I", [gap // 1000 if gap < _MOST_NS else _MOST_NS // 1000 for gap in gaps_ns]).tobytes(),
        longest_gap_us=min(longest_gap[0], _MOST_NS) // 1000,
        longest_gap_of=longest_gap[1],
        memory_peak_bytes=result.memory_peak_bytes,
        bound=bound,
    )


def merged(first: StepReport, then: StepReport) -> StepReport:
    """Two reports as one: it begins with `first`, adds its sums to `then`'s, and keeps `then`'s gauges."""
    changes = {name: getattr(first, name) + getattr(then, name) for name in (*_SUMS, *_JOINED)}
    changes["memory_peak_bytes"] = max(first.memory_peak_bytes, then.memory_peak_bytes)
    slower = max(first, then, key=lambda report: report.longest_gap_us)
    changes |= {"longest_gap_us": slower.longest_gap_us, "longest_gap_of": slower.longest_gap_of}
    return msgspec.structs.replace(then, at_ns=first.at_ns, **changes)
