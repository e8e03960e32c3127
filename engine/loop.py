"""Engine: where the control plane and the device plane meet, and the only place where a step has effects.

A step is five verbs: plan (scheduler) → launch, collect (runner) → commit (scheduler) → publish. The stages take values
and return values; the engine times them, merges what they say into one StepReport, and hands new tokens to its caller.
It owns the order of the verbs and the ladder that an OutOfMemory climbs. It must not know sockets, processes or torch.
Enter at `Engine.step`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from engine.autopsy import Autopsy, told
from engine.budget import Limits
from engine.errors import EngineFault, OutOfMemory
from engine.output import Output
from engine.plan import Runner, SeqSlice, StepPlan, StepResult
from engine.pulse import Pulse
from engine.report import StepTimes, step_report
from engine.request import Request
from engine.scheduler import Scheduler
from engine.stepcost import StepMeter
from telemetry.events import Event
from telemetry.evidence import OF_A_REQUEST

_NOTHING = StepResult(step=0, tokens=())
_MOST_BLAME = 4  # that a request may collect: two steps broken by its doing, or four that would have broken anyway


class Engine:
    """Not thread-safe: one thread calls everything. `publish` must not block; `clock` is monotonic ns."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        publish: Callable[[Event], None],
        clock: Callable[[], int] = time.monotonic_ns,
        pulse: Pulse | None = None,
        autopsy: Autopsy | None = None,
        meter: StepMeter | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._publish = publish
        self._clock = clock
        self._pulse = pulse or Pulse.attach(-1)
        runner.tell(self._pulse.tick)
        self._autopsy = autopsy or Autopsy()
        self._meter = meter or StepMeter()
        self._last_token_ns: dict[str, int] = {}  # live requests that have a token
        self._stall_base_ns: dict[str, int] = {}  # the meter when each of them began to decode
        self._suspects: dict[str, int] = {}  # live requests → blame for failed steps they were the largest part of
        self._failures = 0  # steps in a row that ran out of memory
        self._publish_ns = 0  # of the step before
        self.steps = 0
        self.progress_ns = clock()
        self.starved = False  # the last plan granted nothing: only a command or a deadline can change that

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def scheduler(self) -> Scheduler:
        """To be read only."""
        return self._scheduler

    def submit(self, requests: Sequence[Request]) -> list[Output]:
        """Take new choices. Returns the last outputs of those that can never be served."""
        self.starved = False
        return self._ended(self._scheduler.add(requests, self._clock()))

    def cancel(self, request_ids: Sequence[str], reason: str) -> list[Output]:
        """End these choices now; their blocks are free when this returns."""
        self.starved = False
        return self._ended(self._scheduler.cancel(request_ids, reason, self._clock()))

    def ack(self, taken: dict[str, int]) -> None:
        """Readers have taken so many more tokens of each choice."""
        self.starved = False
        self._scheduler.ack(taken)

    def set_limits(self, limits: Limits) -> None:
        """Take effect at the next plan. They must be within the ceilings."""
        self._scheduler.set_limits(limits)
        self.starved = False

    def step(self) -> list[Output]:
        """One step; returns the new tokens and ends. Raises EngineFault when the engine cannot go on."""
        begun_ns = self._clock()
        self._pulse.tick("plan")
        plan = self._scheduler.plan(begun_ns)
        self._pulse.step(plan.step)
        planned_ns = self._clock()
        self.starved = not (plan.slices or plan.released or plan.why.preempted)
        try:
            result, launched_ns = self._on_device(plan)
        except OutOfMemory as error:
            return self._after_oom(plan, error)
        self._failures = 0
        collected_ns = self._clock()
        self._pulse.tick("commit")
        outputs = self._scheduler.commit(result, collected_ns)
        times = StepTimes(
            begun_ns=begun_ns,
            planned_ns=planned_ns,
            launched_ns=launched_ns,
            collected_ns=collected_ns,
            committed_ns=self._clock(),
            publish_ns=self._publish_ns,
        )
        self.progress_ns = times.committed_ns
        self._pulse.tick("publish")
        if plan.slices or plan.why.preempted or outputs:
            outputs = self._after_step(plan, result, times, outputs)
        return outputs

    def out_of_memory(self, doing: str) -> OutOfMemory:
        """Publish that an allocation outside the device plane failed, and return what to tell of it."""
        self._autopsy.release()
        error = OutOfMemory(
            f"the engine's process could not get memory for {doing}", "give it more, or lower its limits"
        )
        error.phase = doing
        incident = self._autopsy.incident(
            StepPlan(step=self.steps, slices=()),
            error,
            None,
            "",
            self._scheduler.state_facts(),
            self._scheduler.running_views(),
            self._clock(),
        )
        self._publish(incident)
        return error

    def abort_all(self) -> list[Output]:
        """End every choice, as if each had been cancelled."""
        return self.cancel([view.request_id for view in self._scheduler.views()], "abort")

    def sizes(self) -> dict[str, int]:
        """Every map and queue that can grow, for the heartbeat."""
        return {
            **self._scheduler.sizes(),
            "loop_last_token": len(self._last_token_ns),
            "loop_stall_base": len(self._stall_base_ns),
            "loop_suspects": len(self._suspects),
        }

    def step_cost(self) -> dict[str, float]:
        """The fitted cost of a step and its error (engine/stepcost.py); empty until it is known."""
        cost = self._meter.cost
        return {**cost.costs(), "error_ratio": cost.error_ratio} if cost.known else {}

    def idle(self) -> None:
        """There is nothing to do, and it is known: that is progress too."""
        self._pulse.tick("idle")

    def close(self) -> None:
        self._runner.close()

    def _on_device(self, plan: StepPlan) -> tuple[StepResult, int]:
        """Returns the result and the stamp between launch and collect."""
        if not (plan.slices or plan.released or plan.admitted or plan.copies or plan.discarded):
            return replace(_NOTHING, step=plan.step), self._clock()
        self._pulse.tick("launch")
        self._runner.launch(plan)
        launched_ns = self._clock()
        self._pulse.tick("collect")
        return self._runner.collect(), launched_ns

    def _after_step(self, plan: StepPlan, result: StepResult, times: StepTimes, outputs: list[Output]) -> list[Output]:
        """Publish the step; returns the outputs with their decode stall filled in."""
        self.steps += 1
        self._autopsy.step_done(plan)
        on_device_ns = result.forward_ns + result.sample_ns
        bound = self._meter.step(plan, times.committed_ns - times.begun_ns, on_device_ns)
        gaps_ns, longest = self._gaps_ns(outputs, times.collected_ns)
        finished = tuple(output.request_id for output in outputs if output.finish is not None)
        outputs = self._ended(outputs)
        self._publish(
            step_report(
                plan,
                result,
                times,
                self._scheduler.state_facts(),
                finished=finished,
                gaps_ns=gaps_ns,
                longest_gap=longest,
                bound=bound,
            )
        )
        self._publish_ns = self._clock() - times.committed_ns
        return outputs

    def _gaps_ns(self, outputs: list[Output], now_ns: int) -> tuple[list[int], tuple[int, str]]:
        """Time since the token before, of every choice that got one after its first; and the longest with its
        choice."""
        gaps_ns = []
        earliest_ns, slowest = now_ns, ""
        last_ns = self._last_token_ns
        for output in outputs:
            if not output.tokens:
                continue
            before_ns = last_ns.get(output.request_id)
            last_ns[output.request_id] = now_ns
            if before_ns is None:
                self._stall_base_ns[output.request_id] = self._meter.stall_ns
            else:
                gaps_ns.append(now_ns - before_ns)
                if before_ns < earliest_ns:
                    earliest_ns, slowest = before_ns, output.request_id
        return gaps_ns, (now_ns - earliest_ns, slowest)

    def _ended(self, outputs: list[Output]) -> list[Output]:
        """Forget the choices that end here, and tell each how long its decoding was stalled."""
        return [output if output.finish is None else self._forget(output) for output in outputs]

    def _forget(self, output: Output) -> Output:
        self._last_token_ns.pop(output.request_id, None)
        self._suspects.pop(output.request_id, None)
        base_ns = self._stall_base_ns.pop(output.request_id, None)
        if base_ns is None or output.facts is None:
            return output
        stall_ns = min(self._meter.stall_ns - base_ns, output.facts.decode_ns)
        return msgspec.structs.replace(output, facts=replace(output.facts, decode_stall_ns=stall_ns))

    def _after_oom(self, plan: StepPlan, error: OutOfMemory) -> list[Output]:
        """The ladder. First: the step is dropped, the youngest preempted, the token budget lowered, and the caller's
        next step is the retry. Second in a row, or too much blame for the same request: that request fails. Third in a
        row: EngineFault."""
        self._failures += 1
        now_ns = self._clock()
        piece = heaviest(plan, error.row)
        request_id = self._scheduler.in_row(piece.row) if piece else ""
        incident = self._autopsy.incident(
            plan, error, piece, request_id, self._scheduler.state_facts(), self._scheduler.running_views(), now_ns
        )
        self._publish(incident)
        blame = self._suspects.get(request_id, 0) + (2 if incident.cause in OF_A_REQUEST else 1)
        if request_id:  # else its largest part was cancelled while the step ran
            self._suspects[request_id] = blame
        if self._failures > 2:
            raise EngineFault(f"out of memory in {self._failures} steps in a row: {error.message}") from error
        self._scheduler.retry_after_oom(plan, now_ns)
        if self._failures < 2 and blame < _MOST_BLAME:
            return []
        return self._ended(self._scheduler.fail(request_id, error.code, told(incident, error), now_ns))


def heaviest(plan: StepPlan, row: int | None) -> SeqSlice | None:
    """The part of a plan that is blamed for its memory: that of `row`, if it is known, else the largest."""
    of_row = [piece for piece in plan.slices if piece.row == row]
    return max(of_row or plan.slices, key=lambda piece: (piece.count, piece.start), default=None)
