"""A Window out of two Snapshots: what happened between them, as far as a daemon reports it. Pure.

Owns which parts are read. It must not know the daemon or HTTP. Enter at `window_between`; `PARTS` is what to ask for.
"""

import struct
from collections.abc import Sequence
from typing import Final

from autotune.objective import Targets
from autotune.window import Sample, Shape, Window
from engine.stepcost import StepShape
from telemetry.events import RequestRecord, StepReport
from telemetry.snapshot import Snapshot

_MOST_BETWEEN: Final = 2.0  # times a step: a longer pause is not the cost of steps (readers that do not read)
PARTS: Final = ("latency", "queue", "totals", "requests", "kv", "memory", "steps")


def window_between(before: Snapshot, now: Snapshot, targets: Targets) -> Window:
    """The period from `before` to `now`, whose latencies must be of just that time. A snapshot shows the newest steps
    and records only: of more, these stand for all."""
    seconds = (now.at_ns - before.at_ns) / 1e9
    steps = new_steps(before.steps or (), now.steps or ())
    records = _records(before, now)
    good = sum(_good(record, targets) for record in records)
    latency, kv, memory = now.latency, now.kv, now.memory
    finished = round(latency.requests_per_second * seconds) if latency else len(records)
    finished = max(finished, len(records))
    times = [_busy_s(step) for step in steps]
    shown_s = sum(times)
    all_steps = latency.steps_per_second * seconds if latency else 0.0
    shown = sum(max(1, step.merged) for step in steps)
    fixed = None
    if memory and memory.used_bytes is not None and kv and kv.active is not None and kv.block_bytes:
        fixed = memory.used_bytes - kv.active * kv.block_bytes
    return Window(
        seconds=seconds,
        busy_s=min(seconds, shown_s * max(1.0, all_steps / shown)) if shown else 0.0,
        output_tokens=round(latency.output_tokens_per_second * seconds) if latency else 0,
        prefill_tokens=round(latency.prefill_tokens_per_second * seconds) if latency else 0,
        lost_tokens=_grown(before, now, "preempted_tokens"),
        finished=finished,
        good=round(finished * good / len(records)) if records else 0,
        shed=_grown(before, now, "finished", ("shed",)),
        ttft_p95_s=latency.ttft.p95 if latency and latency.ttft.count else None,
        inter_token_p95_s=latency.inter_token.p95 if latency and latency.inter_token.count else None,
        running=_mean([step.running for step in steps], times),
        running_peak=max((step.running for step in steps), default=0),
        waiting=_mean([step.waiting + step.preempted_now for step in steps], times),
        waiting_capacity=_mean([step.waiting_capacity for step in steps], times),
        waiting_kv=_mean([step.waiting_kv for step in steps], times),
        waiting_budget=_mean([step.waiting_budget for step in steps], times),
        kv_peak=max((step.kv_active for step in steps), default=0),
        kv_mean=_mean([step.kv_active for step in steps], times),
        largest_blocks=_largest(steps, kv.block_size if kv and kv.block_size else 0),
        fixed_bytes=fixed,
        samples=tuple(samples_of(steps)),
        shapes=tuple(Shape(r.prompt_tokens, r.cached_tokens, r.output_tokens) for r in records),
    )


def new_steps(before: Sequence[StepReport], now: Sequence[StepReport]) -> list[StepReport]:
    """Those that were told of since. Not those that began since: a step that is under way at a look is told of later,
    and the longer steps are, the more of them would be left out."""
    last_ns = before[-1].at_ns if before else 0
    return [step for step in now if step.at_ns > last_ns]


def _busy_s(step: StepReport) -> float:
    """All of the step, with the publication of the one before: it is as long."""
    return (step.plan_ns + step.launch_ns + step.collect_ns + step.commit_ns + step.publish_ns) / 1e9


def samples_of(steps: Sequence[StepReport]) -> list[Sample]:
    """What each report says of the cost of a step. While the engine has work a step lasts until the next one begins:
    what lies between them, such as taking messages in, has to be paid as well."""
    found = []
    for n, step in enumerate(steps):
        after = steps[n + 1] if n + 1 < len(steps) else None
        times, seconds = max(1, step.merged), _busy_s(step)
        if after and after.step - max(1, after.merged) == step.step and step.running:
            seconds = max(seconds, min((after.at_ns - step.at_ns) / 1e9, _MOST_BETWEEN * seconds))
        numbers = struct.unpack(f"<{len(step.rows) // 4}i", step.rows)
        pieces = zip(numbers[1::3], numbers[2::3], strict=True) if step.prefill_rows else ()
        shape = StepShape.counted(step.decode_rows, step.context_tokens, pieces, times)
        found.append(Sample(shape, seconds / times))
    return found


def _records(before: Snapshot, now: Snapshot) -> list[RequestRecord]:
    found = now.requests.finished if now.requests else []
    return [record for record in found if record.at_ns > before.at_ns and record.output_tokens]


def _good(record: RequestRecord, targets: Targets) -> bool:
    """Whether a request met every target and got all that it asked for."""
    if record.reason not in ("stop", "length") or not record.first_token_ns:
        return False
    whole = record.reason == "stop" or record.output_tokens >= record.max_tokens
    gap_s = (record.last_token_ns - record.first_token_ns) / 1e9 / max(1, record.output_tokens - 1)
    return whole and targets.met((record.first_token_ns - record.arrival_ns) / 1e9, gap_s)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total else 0.0


def _grown(before: Snapshot, now: Snapshot, name: str, keys: Sequence[str] | None = None) -> int:
    """How much a family of counters grew."""
    if before.totals is None or now.totals is None:
        return 0
    was, counts = getattr(before.totals, name), getattr(now.totals, name)
    return int(sum(counts[key] - was.get(key, 0) for key in keys or counts if key in counts))


def _largest(steps: Sequence[StepReport], block_size: int) -> int:
    """The blocks of the longest sequence that was granted something. Rows are (row, start, count)."""
    if not block_size:
        return 0
    longest = 0
    for step in steps:
        numbers = struct.unpack(f"<{len(step.rows) // 4}i", step.rows)
        longest = max(longest, max(map(sum, zip(numbers[1::3], numbers[2::3], strict=True)), default=0))
    return -(-longest // block_size)
