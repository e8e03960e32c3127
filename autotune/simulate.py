"""The simulator: the real scheduler and block pool against a device that only takes time, in virtual time.

Owns the virtual clock, the jump over identical decode steps, and the account of what came out. How long a step takes is
the cost model's, what arrives is the workload's, and the tuner is the one that a daemon runs. It must not know tensors,
sockets or wall clocks. Enter at `Simulation.run`.
"""

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from autotune.objective import Targets
from autotune.space import Space
from autotune.window import Cells, Gauge, Sample, Shape, Window
from autotune.workload import Job, Traffic
from engine.budget import Limits, Resolved
from engine.output import Output
from engine.plan import StepPlan, StepResult
from engine.request import FinishReason, Request, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stepcost import StepCost, StepShape

_TOKEN = 1
_STREAM_TOKENS = 1 << 14  # so that streams of prompts do not overlap
_NS = 1_000_000_000
# From the end of an answer to the request that follows it: what counts is that this misses the step that begins at the
# same moment, whose free row goes to one who waits already.
_TURNAROUND_S = 0.01


class Steering(Protocol):
    """The tuner as the simulator sees it."""

    def steer(self, window: Window, limits: Limits, now_s: float) -> Limits:
        """The limits for the next period."""


class JumpingScheduler(Scheduler):
    """The scheduler, and the effect of many identical decode steps at once."""

    def jump(self, most: int, like: int, now_ns: int) -> tuple[int, int]:
        """As if up to `most` steps had granted every running sequence one position. Returns how many, and how many
        rows; (0, 0) where the next step would not be like the last, which had `like` rows: one that has ended leaves
        its row to who waits. Stops before anybody ends or needs a block that is not there."""
        rows = list(self._roster.running.values())
        if not rows or len(rows) != like or len(rows) > self._limits.max_num_batched_tokens * 7 // 8:
            return 0, 0
        for sequence in rows:
            if len(sequence.tokens) - sequence.computed != 1 or not sequence.first_token_ns:
                return 0, 0
            most = min(
                most,
                sequence.max_len - len(sequence.tokens) - 1,
                sequence.request.sampling.max_tokens - sequence.output_len - 1,
            )
        room = self._pool.available
        while most > 0 and sum(self._growth(sequence, most) for sequence in rows) > room:
            most //= 2
        if most <= 0:
            return 0, 0
        for sequence in rows:
            self._advance(sequence, most, now_ns)
        self._granted_tokens += most * len(rows)
        return most, len(rows)

    @property
    def waits(self) -> int:
        """Sequences that the next plan would look at for admission."""
        return len(self._roster.waiting)

    @property
    def largest_blocks(self) -> int:
        return max((len(one.blocks) for one in self._roster.running.values()), default=0)

    @property
    def active_blocks(self) -> int:
        return self._pool.active

    def _growth(self, sequence: Sequence, steps: int) -> int:
        size = self._kv.block_size
        return max(0, -(-(sequence.computed + steps) // size) - len(sequence.blocks))

    def _advance(self, sequence: Sequence, steps: int, now_ns: int) -> None:
        for _ in range(self._growth(sequence, steps)):
            self._kv.grow(sequence)
        sequence.tokens.extend([_TOKEN] * steps)
        sequence.computed += steps
        sequence.last_token_ns = now_ns
        if sequence.computed // self._kv.block_size > sequence.named_blocks:
            self._kv.name_full(sequence)


@dataclass(slots=True)
class _Live:
    """A request under way: what it will produce under the limits it arrived in, and when it last did."""

    job: Job
    output_tokens: int
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What a run came to. Figures other than `periods` are of the time after `scored_from_s`."""

    seconds: float = 0.0
    offered: int = 0
    finished: int = 0
    good: int = 0
    good_tokens: int = 0
    output_tokens: int = 0
    shed: int = 0
    refused: int = 0
    truncated: int = 0
    preemptions: int = 0
    busy_s: float = 0.0
    over_watermark_s: float = 0.0
    past_hard_line: int = 0  # steps after which more was in use than the hard line allows
    kv_peak: int = 0
    steps: int = 0
    planned_steps: int = 0  # of these, how many the scheduler planned; the others were jumped
    ttft: Cells = field(default_factory=Cells)
    gaps: Cells = field(default_factory=Cells)
    latency: Cells = field(default_factory=Cells)
    periods: list[tuple[float, Limits, Window]] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Output tokens per second of requests that met every target, whole."""
        return self.good_tokens / self.seconds if self.seconds else 0.0

    @property
    def attained(self) -> float:
        """Of all that came to an end, the share that counts."""
        ended = self.finished + self.shed + self.refused
        return self.good / ended if ended else 1.0


class Simulation:
    """One engine under `traffic`. `noise` is the relative spread of step times; `max_queue` as admission's."""

    def __init__(
        self,
        resolved: Resolved,
        limits: Limits,
        cost: StepCost,
        traffic: Traffic,
        *,
        targets: Targets | None = None,
        tuner: Steering | None = None,
        period_s: float = 5.0,
        noise: float = 0.02,
        seed: int = 0,
        max_queue: int = 1024,
        scored_from_s: float = 0.0,
        watch: Callable[[StepPlan, JumpingScheduler], None] | None = None,
    ) -> None:
        self.cost = cost  # may be replaced while it runs: a machine that becomes slower
        self.limits = limits
        self._space = Space.of(resolved)
        self._scheduler = JumpingScheduler(resolved, limits, output_credit=1 << 40)
        self._traffic = traffic
        self._targets = targets or Targets()
        self._tuner = tuner
        self._period_s = period_s
        self._noise = noise
        self._rng = random.Random(f"{seed}:noise")
        self._max_queue = max_queue
        self._scored_from_s = scored_from_s
        self._watch = watch
        self._now_s = 0.0
        self._live: dict[str, _Live] = {}  # by id
        self._jumped_s = 0.0  # when a jump last gave every running sequence tokens
        self._later: list[tuple[float, int, Job]] = []  # jobs that others brought about
        self._coming: Iterator[Job] = iter(traffic.arrivals())
        self._next: Job | None = next(self._coming, None)
        self._gauge = Gauge(self._targets)
        self._outcome = Outcome()

    @property
    def now_s(self) -> float:
        return self._now_s

    def run(self, until_s: float) -> Outcome:
        """Go on until that time. May be called again with a later one."""
        boundary_s = self._boundary()
        while self._now_s < until_s:
            self._let_in()
            next_s = min(boundary_s, until_s, self._next_arrival())
            if self._scheduler.has_work:
                self._step(next_s)
            else:
                self._now_s = next_s
            if self._now_s >= boundary_s:
                self._control()
                boundary_s = self._boundary()
        self._outcome.seconds = max(0.0, self._now_s - self._scored_from_s)
        return self._outcome

    def set_limits(self, limits: Limits) -> None:
        self._scheduler.set_limits(limits)
        self.limits = limits

    def _boundary(self) -> float:
        return (int(self._now_s / self._period_s + 1e-9) + 1) * self._period_s

    def _control(self) -> None:
        """The end of a control period: the window goes to the tuner, which may answer with other limits."""
        self._gauge.largest_blocks = self._scheduler.largest_blocks
        window = self._gauge.window(self._period_s, self._space.fixed_bytes)
        self._gauge = Gauge(self._targets)
        self._outcome.periods.append((self._now_s, self.limits, window))
        if self._tuner is not None:
            limits = self._tuner.steer(window, self.limits, self._now_s)
            if limits != self.limits:
                self.set_limits(limits)

    # -- arrivals

    def _next_arrival(self) -> float:
        coming = self._next.at_s if self._next else float("inf")
        return min(coming, self._later[0][0]) if self._later else coming

    def _let_in(self) -> None:
        while self._next is not None and self._next.at_s <= self._now_s:
            self._arrive(self._next)
            self._next = next(self._coming, None)
        while self._later and self._later[0][0] <= self._now_s:
            self._arrive(heapq.heappop(self._later)[2])

    def _arrive(self, job: Job) -> None:
        scored = self._now_s >= self._scored_from_s
        self._outcome.offered += scored
        if self._scheduler.waits >= self._max_queue:
            self._gauge.figures["shed"] += 1
            self._outcome.shed += scored
            self._follow(job)
            return
        name = f"{job.serial}"
        room = max(1, self.limits.context_limit - job.prompt_tokens)
        self._live[name] = _Live(job, min(job.output_tokens, room))
        request = Request(
            id=name, prompt=tokens_of(job), sampling=SamplingParams(max_tokens=job.output_tokens, temperature=0.0)
        )
        for output in self._scheduler.add([request], self._ns()):
            self._end(output)

    def _follow(self, job: Job) -> None:
        after = self._traffic.after(job, self._now_s)
        if after is not None:
            at_s = max(after.at_s, self._now_s + _TURNAROUND_S)
            heapq.heappush(self._later, (at_s, after.serial, after))

    # -- steps

    def _ns(self) -> int:
        return 1 + int(self._now_s * _NS)

    def _step(self, next_s: float) -> None:
        """One planned step, and the identical ones after it."""
        plan = self._scheduler.plan(self._ns())
        why = plan.why
        if not plan.slices:  # nothing can run: only an arrival can change that, or a limit
            self._commit(plan)
            if not (plan.released or why.preempted):
                self._now_s = max(next_s, self._now_s + 1e-3)
            return
        prefill = why.prefill_tokens + why.recompute_tokens
        shape = StepShape.of(plan)
        sample = Sample(shape, self._took(shape))
        self._now_s += sample.seconds
        self._commit(plan)
        self._account(plan, 1, sample)
        self._gauge.figures["prefill_tokens"] += why.prefill_tokens
        self._gauge.figures["lost_tokens"] += sum(lost.tokens_lost for lost in why.preempted)
        if self._now_s >= self._scored_from_s:
            self._outcome.preemptions += len(why.preempted)
        if self._watch is not None:
            self._watch(plan, self._scheduler)
        if prefill == 0 and not plan.admitted and not plan.released and not why.preempted:
            self._jump(plan, next_s)

    def _jump(self, plan: StepPlan, next_s: float) -> None:
        rows, context = plan.why.decode_rows, plan.why.context_tokens
        step_s = self._took(StepShape(0, rows, context + rows))
        most = int((next_s - self._now_s) / step_s) if step_s > 0 else 0
        steps, moved = self._scheduler.jump(most, rows, self._ns())
        if not steps:
            return
        seconds = step_s * steps + self.cost.context_s * rows * steps * (steps - 1) / 2
        self._now_s += seconds
        mean = Sample(StepShape(0, moved, context + rows * (steps + 1) / 2), seconds / steps)
        self._account(plan, steps, mean)
        self._gauge.figures["output_tokens"] += steps * moved
        self._gap(mean.seconds, steps * moved)
        self._jumped_s = self._now_s
        if self._now_s >= self._scored_from_s:
            self._outcome.output_tokens += steps * moved

    def _took(self, shape: StepShape) -> float:
        return self.cost.seconds(shape) * max(0.2, self._rng.gauss(1.0, self._noise))

    def _commit(self, plan: StepPlan) -> None:
        tokens = tuple([(_TOKEN,) if piece.sample else () for piece in plan.slices])
        for output in self._scheduler.commit(StepResult(plan.step, tokens), self._ns()):
            self._take(output)

    def _account(self, plan: StepPlan, steps: int, sample: Sample) -> None:
        why, facts = plan.why, self._scheduler.state_facts()
        now = {
            "running": facts.running,
            "waiting": facts.waiting + facts.preempted,
            "capacity": why.waiting_capacity,
            "blocked": why.waiting_kv,
            "budget": why.waiting_budget,
            "kv": facts.kv_active,
        }
        seconds = sample.seconds * steps
        self._gauge.busy(seconds, steps, sample, now)
        outcome = self._outcome
        outcome.steps += steps
        outcome.planned_steps += 1 if steps == 1 else 0
        if facts.kv_active > self._space.hard_blocks:
            outcome.past_hard_line += 1
        if self._now_s >= self._scored_from_s:
            outcome.busy_s += seconds
            outcome.kv_peak = max(outcome.kv_peak, facts.kv_active)
            if facts.kv_active > self._space.watermark_blocks:
                outcome.over_watermark_s += seconds

    # -- ends

    def _take(self, output: Output) -> None:
        scored = self._now_s >= self._scored_from_s
        live = self._live[output.request_id]
        if output.tokens:
            self._gauge.figures["output_tokens"] += 1
            self._outcome.output_tokens += scored
            if live.first_s:
                self._gap(self._now_s - max(live.last_s, self._jumped_s), 1)
            else:
                live.first_s = self._now_s
                self._gauge.ttft.add(self._now_s - live.job.at_s)
                if scored:
                    self._outcome.ttft.add(self._now_s - live.job.at_s)
            live.last_s = self._now_s
        if output.finish is not None:
            self._end(output)

    def _gap(self, seconds: float, times: int) -> None:
        self._gauge.gaps.add(seconds, times)
        if self._now_s >= self._scored_from_s:
            self._outcome.gaps.add(seconds, times)

    def _end(self, output: Output) -> None:
        live = self._live.pop(output.request_id)
        job, outcome, scored = live.job, self._outcome, self._now_s >= self._scored_from_s
        self._follow(job)
        if output.finish is FinishReason.ERROR or output.facts is None:
            self._gauge.figures["shed"] += 1
            outcome.refused += scored
            return
        per_token_s = (self._now_s - live.first_s) / max(1, live.output_tokens - 1)
        shape = Shape(job.prompt_tokens, output.facts.cached_tokens, live.output_tokens)
        truncated = live.output_tokens < job.output_tokens
        good = self._gauge.ended(shape, live.first_s - job.at_s, per_token_s, truncated)
        if scored:
            outcome.finished += 1
            outcome.good += good
            outcome.good_tokens += live.output_tokens if good else 0
            outcome.truncated += truncated
            outcome.latency.add(self._now_s - job.at_s)


def tokens_of(job: Job) -> tuple[int, ...]:
    """The prompt: numbers that two jobs share just as far as their streams agree."""
    shared = min(job.system_tokens, job.prompt_tokens)
    own = job.prompt_tokens - shared
    first = (job.stream * _STREAM_TOKENS) & 0x3FFF_FFFF
    system = (1 << 30) + job.system * _STREAM_TOKENS
    return (*range(system, system + shared), *range(first, first + own))
