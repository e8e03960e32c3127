"""The fold: events in, figures out.

Owns how each event changes `State`, and the one lock between the thread that folds and those that read. It must not
know metric names or HTTP. Enter at `Fold.take` (it is a sink of the bus) and `Fold.reading`.

Step reports and records are deltas, and the few absolute figures of an engine are turned into deltas here, so that no
counter goes back when an engine is restarted. No string of a client becomes a key of anything that is not capped: an
unknown reason or cause is counted under one that is in its set.
"""

import logging
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from telemetry import events
from telemetry.events import Event
from telemetry.state import KEPT_NOTES, KEPT_RECORDS, KEPT_RULES, KEPT_TRACED, Blocks, Queue, State
from telemetry.stats import Exemplar

log = logging.getLogger(__name__)

_SECOND = 1_000_000_000


class Fold:
    """Folds events into a `State`. `clock` gives monotonic nanoseconds, `wall` Unix seconds (for exemplars)."""

    def __init__(
        self, model: str, clock: Callable[[], int] = time.monotonic_ns, wall: Callable[[], float] = time.time
    ) -> None:
        self.clock = clock
        self._wall = wall
        self._state = State(model=model)
        # Choices seen and longest answer of a request, while some of its choices run.
        self._groups: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._traced: OrderedDict[str, str] = OrderedDict()  # running choices whose trace is sampled → its id
        self._lock = threading.Lock()
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            events.StepReport: self._step,
            events.FirstToken: self._first_token,
            events.RequestRecord: self._record,
            events.RequestSample: lambda _: None,  # for the journal
            events.TokenMix: self._token_mix,
            events.EngineStatus: self._engine_status,
            events.MemoryReport: self._memory,
            events.EngineStarted: self._engine_started,
            events.EngineEnded: self._engine_ended,
            events.LimitsChanged: self._limits_changed,
            events.TargetsMissed: self._targets_missed,
            events.Decision: self._decision,
            events.Finding: self._finding,
            events.Incident: self._incident,
            events.StateChanged: self._state_changed,
            events.LoopLag: self._loop_lag,
        }

    @property
    def handles(self) -> frozenset[type[Event]]:
        """The events that the fold understands."""
        return frozenset(self._handlers)

    def take(self, batch: Sequence[Event]) -> None:
        """Fold every event; one that cannot be folded is counted, and the rest still is."""
        with self._lock:
            for event in batch:
                try:
                    self._handlers[type(event)](event)
                except Exception:
                    self._state.unfolded += 1
                    if self._state.unfolded == 1:
                        log.exception("an event could not be folded; more of these are only counted")

    @contextmanager
    def reading(self) -> Iterator[State]:
        """The state, held still. Keep it short: folding waits meanwhile. Do not change it or keep references."""
        with self._lock:
            yield self._state

    def record(self, request_id: str) -> events.RequestRecord | None:
        """The record of a finished choice, while it is kept. Its HTTP request's id finds the first choice."""
        with self._lock:
            found = self._state.records.get(request_id)
            if found is not None:
                return found
            return next((r for r in self._state.records.values() if r.group_id == request_id), None)

    def sizes(self) -> dict[str, int]:
        """Entries of the fold's own maps that grow with traffic (all of them capped)."""
        with self._lock:
            return {
                "fold_records": len(self._state.records),
                "fold_steps": len(self._state.steps),
                "fold_groups": len(self._groups),
                "fold_traced": len(self._traced),
            }

    # Requests

    def _first_token(self, event: events.FirstToken) -> None:
        seconds = event.ttft_ns / _SECOND
        if event.trace_id:
            self._traced[event.request_id] = event.trace_id
            if len(self._traced) > KEPT_TRACED:
                self._traced.popitem(last=False)
        self._state.ttft.add(seconds, self._exemplar(event.trace_id, seconds))
        self._state.window.observe(event.at_ns, "ttft", (seconds,))
        self._state.window.count(event.at_ns, "output_tokens", 1)

    def _record(self, record: events.RequestRecord) -> None:
        state, at = self._state, record.at_ns
        _bump(state.finished, record.reason, 1, "error")
        self._traced.pop(record.request_id, None)
        state.records[record.request_id] = record
        if len(state.records) > KEPT_RECORDS:
            state.records.popitem(last=False)
        for stage, spent_ns in record.stages.items():
            if stage in state.stages:
                state.stages[stage].add(spent_ns / _SECOND)
                state.window.count(at, f"stage.{stage}", spent_ns)
        for kind, spent_ns in record.overlaps.items():
            if kind in state.overlaps:
                state.overlaps[kind].add(spent_ns / _SECOND)
        if record.reason not in events.NEVER_SERVED:
            self._served(record)

    def _served(self, record: events.RequestRecord) -> None:
        state = self._state
        seconds = (record.at_ns - record.arrival_ns) / _SECOND
        trace_id = record.trace_id if record.trace_sampled else ""
        exemplar = self._exemplar(trace_id, seconds)
        state.latency.add(seconds, exemplar)
        state.window.observe(record.at_ns, "e2e", (seconds,))
        state.window.count(record.at_ns, "requests", 1)
        state.prompt_tokens += record.prompt_tokens
        state.cached_prompt_tokens += record.cached_tokens
        state.output_tokens += record.output_tokens
        state.prompt_lengths.add(record.prompt_tokens)
        state.output_lengths.add(record.output_tokens)
        self._longest(record)
        state.max_tokens.add(record.max_tokens)
        if record.index == 0:
            state.choices.add(record.n)
        if record.scheduled_ns and record.queued_ns:
            state.queued.add((record.scheduled_ns - record.queued_ns) / _SECOND)
        if record.scheduled_ns and record.first_token_ns:
            decode = (record.last_token_ns - record.first_token_ns) / _SECOND
            state.prefilled.add((record.first_token_ns - record.scheduled_ns) / _SECOND)
            state.decoded.add(decode)
            state.inferred.add((record.last_token_ns - record.scheduled_ns) / _SECOND)
            if record.output_tokens > 1:
                per_token = decode / (record.output_tokens - 1)
                state.per_token.add(per_token, self._exemplar(trace_id, per_token))

    def _longest(self, record: events.RequestRecord) -> None:
        """The longest answer of a request is known when the last of its n choices is."""
        if record.n == 1:
            self._state.longest_outputs.add(record.output_tokens)
            return
        groups = self._groups
        seen, longest = groups.pop(record.group_id, (0, 0))
        seen, longest = seen + 1, max(longest, record.output_tokens)
        if seen >= record.n:
            self._state.longest_outputs.add(longest)
            return
        groups[record.group_id] = (seen, longest)
        if len(groups) > KEPT_RECORDS:
            groups.popitem(last=False)

    # Steps

    def _step(self, report: events.StepReport) -> None:
        state, times = self._state, max(1, report.merged)
        state.steps.append(report)
        if report.memory_peak_bytes:
            state.peaks_bytes.append(report.memory_peak_bytes)
        for phase, histogram in state.phases.items():
            spent_ns = getattr(report, f"{phase}_ns")
            histogram.add(spent_ns / times / _SECOND, times=times)
            state.window.count(report.at_ns, f"step.{phase}", spent_ns)
        for phase, histogram in state.device_phases.items():
            spent_ns = getattr(report, f"{phase}_ns")
            if spent_ns:
                histogram.add(spent_ns / times / _SECOND, times=times)
        for kind in state.step_tokens:
            state.step_tokens[kind] += getattr(report, f"{kind}_tokens")
        granted = report.prefill_tokens + report.decode_tokens + report.recompute_tokens + report.draft_tokens
        state.iteration_tokens.add(granted / times, times=times)
        state.window.count(report.at_ns, "steps", times)
        state.window.count(report.at_ns, "prefill_tokens", report.prefill_tokens)
        self._gaps(report)
        for outcome in state.prefix:
            state.prefix[outcome] += getattr(report, f"prefix_{outcome}_tokens")
        for lost in report.preemptions:
            _bump(state.preemptions, lost.cause, 1, "kv")
            _bump(state.preempted_tokens, lost.cause, lost.tokens_lost, "kv")
        if report.bound in state.bound:
            state.bound[report.bound] += times
        state.queue = Queue(
            report.running,
            report.waiting,
            report.preempted_now,
            report.waiting_capacity,
            report.waiting_kv,
            report.waiting_budget,
        )
        stranded = report.kv_stranded_blocks + self._too_few(report)
        state.blocks = Blocks(report.kv_active, report.kv_cached, report.kv_free, report.kv_tail_slots, stranded)
        busy_ns = report.plan_ns + report.launch_ns + report.collect_ns + report.commit_ns
        self._progress(report.at_ns + busy_ns)

    def _too_few(self, report: events.StepReport) -> int:
        """Free blocks that are too few for the head of the queue: of no use now, like those that are held. Beyond the
        watermark they are reserve, kept on purpose."""
        line = self._state.limits.watermark_blocks if self._state.limits else 0
        below = max(0, line - report.kv_active) if line else report.kv_free
        return min(report.kv_free, below) if report.waiting_kv else 0

    def _gaps(self, report: events.StepReport) -> None:
        count = len(report.gaps_us) // 4
        if count:
            gaps = [gap / 1e6 for gap in sorted(struct.unpack_from(f"<{count}I", report.gaps_us))]
            self._state.gap.add_all(gaps)
            slowest = self._exemplar(self._traced.get(report.longest_gap_of, ""), report.longest_gap_us / 1e6)
            if slowest is not None:
                self._state.gap.link(slowest)
            self._state.window.observe(report.at_ns, "gap", gaps)
            self._state.window.count(report.at_ns, "output_tokens", count)

    # The engine's life

    def _engine_status(self, status: events.EngineStatus) -> None:
        state, before = self._state, self._state.status
        state.status, state.limits = status, status.limits
        state.engine_dropped += _grown(before.telemetry_dropped if before else 0, status.telemetry_dropped)
        state.engine_cpu_ns += _grown(before.cpu_ns if before else 0, status.cpu_ns)
        for kind, ages in status.block_ages_ms.items():
            if kind in state.block_ages:
                count = len(ages) // 4
                state.block_ages[kind].add_all([age / 1e3 for age in sorted(struct.unpack_from(f"<{count}I", ages))])
        queue = state.queue
        queue.running, queue.waiting = status.running, status.waiting
        if status.waiting == 0:
            state.queue = Queue(running=status.running)
        if status.kv_active + status.kv_cached + status.kv_free:
            tail, stranded = (state.blocks.tail_slots, state.blocks.stranded) if state.blocks else (0, 0)
            idle = status.kv_active == 0
            state.blocks = Blocks(
                status.kv_active, status.kv_cached, status.kv_free, 0 if idle else tail, 0 if idle else stranded
            )
        self._progress(status.progress_ns)

    def _engine_started(self, event: events.EngineStarted) -> None:
        state = self._state
        self._count_restart()
        state.started, state.ended, state.limits = event, None, event.limits
        state.progress_ns = event.at_ns

    def _engine_ended(self, event: events.EngineEnded) -> None:
        state = self._state
        self._count_restart()
        state.ended, state.status, state.blocks, state.progress_ns = event, None, None, None
        state.queue = Queue()
        state.memory.pop("engine", None)

    def _count_restart(self) -> None:
        """An engine that starts or ends after another one ended is a restart, even if it never became ready."""
        before = self._state.ended
        if before is not None and before.cause in self._state.restarts:
            self._state.restarts[before.cause] += 1

    def _progress(self, at_ns: int) -> None:
        if self._state.ended is None:
            self._state.progress_ns = max(self._state.progress_ns or 0, at_ns)

    # Everything else

    def _memory(self, report: events.MemoryReport) -> None:
        if report.process in ("daemon", "engine"):
            self._state.memory[report.process] = report

    def _token_mix(self, mix: events.TokenMix) -> None:
        self._state.mix = mix

    def _limits_changed(self, event: events.LimitsChanged) -> None:
        self._state.limits = event.limits

    def _targets_missed(self, event: events.TargetsMissed) -> None:
        self._state.missed_targets = event.missed

    def _decision(self, event: events.Decision) -> None:
        kept = self._state.decisions
        if event.number and event.verdict:
            for index, earlier in enumerate(kept):
                if earlier.number == event.number:
                    kept[index] = msgspec.structs.replace(event, at_ns=earlier.at_ns)  # when it was made
                    return
        kept.append(event)
        key = (event.rule, event.knob, event.direction)
        counts = self._state.decision_counts
        if key in counts or len(counts) < KEPT_RULES:
            counts[key] = counts.get(key, 0) + 1

    def _finding(self, event: events.Finding) -> None:
        """The latest of each runbook, in the order in which they came; one that is over is no longer shown."""
        findings = self._state.findings
        findings.pop(event.runbook, None)
        if event.active and len(findings) < KEPT_NOTES:
            findings[event.runbook] = event

    def _incident(self, event: events.Incident) -> None:
        self._state.incidents.append(event)
        _bump(self._state.incident_counts, event.kind, 1, "crash")
        if event.kind == "oom":
            _bump(self._state.ooms, event.cause, 1, "unknown")

    def _state_changed(self, event: events.StateChanged) -> None:
        self._state.lifecycle = event

    def _loop_lag(self, event: events.LoopLag) -> None:
        histogram = self._state.lag.get(event.loop)
        if histogram is not None:
            lags = [lag / 1e6 for lag in sorted(event.lags_us)]
            histogram.add_all(lags)
            self._state.window.observe(event.at_ns, f"lag.{event.loop}", lags)

    def _exemplar(self, trace_id: str, value: float) -> Exemplar | None:
        return Exemplar(trace_id, value, self._wall()) if trace_id else None


def _bump(counts: dict[str, int], name: str, by: int, other: str) -> None:
    """Add to a closed set of counters. A name outside the set is a defect of ours: it is counted under `other`."""
    counts[name if name in counts else other] += by


def _grown(before: int, now: int) -> int:
    """How much an absolute figure of an engine's life grew; one that fell belongs to a new engine, which began at 0."""
    return now - before if now >= before else now
