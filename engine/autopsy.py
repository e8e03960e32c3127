"""Autopsy: from an OutOfMemory and the plan it broke to an Incident with its verdict, and to what its victim is told.

Owns the conversion of the device plane's readings into telemetry's, and what counts as a typical step. It must not
judge (telemetry/forensics.py) or decide who is to fail (engine/loop.py). Enter at `Autopsy.incident`.
"""

import mmap
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from statistics import median_low

from engine.errors import MemoryReading, OutOfMemory
from engine.plan import SeqSlice, StepPlan
from engine.report import StateFacts
from engine.sequence import SequenceView
from telemetry.events import Incident, RequestView
from telemetry.evidence import FailedStep, MemoryFault, Reading
from telemetry.forensics import judge_memory

Readings = tuple[MemoryReading, MemoryReading, MemoryReading]
_RESERVE_BYTES = 4 << 20  # of addresses; nothing is ever written there
_TYPICAL_STEPS = 64
_MOST_REQUESTS = 32


class Autopsy:
    """`activation_bytes` is what the plan at start kept for a step; `readings` measures where an error brings none."""

    def __init__(self, activation_bytes: int = 0, readings: Callable[[], Readings | None] = lambda: None) -> None:
        self._activation_bytes = activation_bytes
        self._readings = readings
        self._reserve: mmap.mmap | None = mmap.mmap(-1, _RESERVE_BYTES)
        self._tokens: deque[int] = deque(maxlen=_TYPICAL_STEPS)

    def step_done(self, plan: StepPlan) -> None:
        """A step that was computed: what is typical."""
        if plan.slices:
            self._tokens.append(plan.tokens)
        if self._reserve is None:
            with suppress(OSError, MemoryError):  # the next step may have more luck
                self._reserve = mmap.mmap(-1, _RESERVE_BYTES)

    def release(self) -> None:
        """Give back what was put by: to say that there is no memory takes some. The next good step takes it again."""
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            reserve.close()

    def incident(
        self,
        plan: StepPlan,
        error: OutOfMemory,
        piece: SeqSlice | None,
        request_id: str,
        state: StateFacts,
        running: list[SequenceView],
        now_ns: int,
    ) -> Incident:
        """`piece` is the part of the plan that is blamed, `request_id` whose it is (empty: nobody's any more)."""
        self.release()
        step = FailedStep(
            step=plan.step,
            phase=error.phase,
            tokens=plan.tokens,
            rows=len(plan.slices),
            context_tokens=plan.why.context_tokens,
            request_id=request_id,
            chunk_start=piece.start if piece else 0,
            chunk_tokens=piece.count if piece else 0,
            typical_tokens=median_low(self._tokens) if self._tokens else 0,
            waiting=state.waiting,
            running=state.running,
            kv_active=state.kv_active,
            kv_blocks=state.kv_active + state.kv_cached + state.kv_free,
        )
        readings = error.readings or self._measured()
        first, before, at = (_reading(each) for each in readings) if readings else (Reading(),) * 3
        fault = MemoryFault(
            requested_bytes=error.requested_bytes,
            step=step,
            first=first,
            before=before,
            at=at,
            planned_activation_bytes=self._activation_bytes or None,
        )
        verdict = judge_memory(fault)
        return Incident(
            at_ns=now_ns,
            incident_id=f"oom-{now_ns}",
            kind="oom",
            cause=verdict.cause,
            summary=verdict.summary,
            request_ids=(request_id,) if request_id else (),
            clues=verdict.clues,
            knobs=verdict.knobs,
            memory=fault,
            requests=tuple(map(_view, running[:_MOST_REQUESTS])),
        )

    def _measured(self) -> Readings | None:
        with suppress(OSError, MemoryError):  # measuring takes a little memory too
            return self._readings()
        return None


def told(incident: Incident, error: OutOfMemory) -> str:
    """For the one whose request fails: what, why, and which knob."""
    knob = incident.knobs[0]
    return f"{error.message} for this request ({incident.cause}); {knob.name}: {knob.advice}"


def _reading(reading: MemoryReading) -> Reading:
    return Reading(**asdict(reading))


def _view(view: SequenceView) -> RequestView:
    return RequestView(
        request_id=view.request_id,
        state=view.state,
        received_ns=view.received_ns,
        prompt_tokens=view.prompt_tokens,
        output_tokens=view.output_tokens,
        max_tokens=view.max_tokens,
        computed_tokens=view.computed_tokens,
        cached_tokens=view.cached_tokens,
        blocks=view.kv_blocks,
        row=view.row,
        priority=view.priority,
        preemptions=view.preemptions,
    )
