"""A small engine under an arbitrary history, and everything that must be true of it after every step.

Driven by hypothesis in tests/properties and by a random generator, for a million steps, in tests/perf/state_machine.py.
Each promise is an assertion in here or in the FakeRunner.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from engine.budget import Limits
from engine.output import Output
from engine.plan import StepPlan
from engine.request import FinishReason, Request
from engine.scheduler import Scheduler
from engine.sequence import Sequence, State
from tests.fakes.runner import lone_run
from tests.fakes.scheduling import Bench, ceilings, request, widest

_LONGEST_WAIT_STEPS = 5000  # of a most urgent request, among at most `MOST_LIVE` small ones
MOST_LIVE = 12
DRAIN_STEPS = 4000


@dataclass
class World:
    """`shape` are ceilings; `patience` is how many tokens a reader leaves unread at most."""

    shape: dict[str, Any]
    patience: int = 1 << 30
    steps: int = 0
    asked: dict[str, Request] = field(default_factory=dict)
    _count: int = 0
    _granted_at: dict[str, int] = field(default_factory=dict)  # live sequences → step of the last grant, or arrival
    _oom: bool = False

    def __post_init__(self) -> None:
        resolved = ceilings(**self.shape)
        self._widest = widest(resolved)
        self._bench = Bench(resolved, self._widest, self.patience)
        self._bench.runner.oom = self._runs_out
        self._limits = self._widest

    @property
    def scheduler(self) -> Scheduler:
        return self._bench.scheduler

    @property
    def live(self) -> list[str]:
        return list(self.scheduler._roster.live)

    def add(self, prompt: tuple[int, ...], tokens: int, choices: int = 1, **fields: Any) -> None:
        """One HTTP request of some choices, if there is room for more in this world."""
        if len(self.live) + choices > MOST_LIVE:
            return
        self._count += 1
        group = [
            request(f"r{self._count}.{i}", prompt, tokens, seed=i, group_id=f"g{self._count}", **fields)
            for i in range(choices)
        ]
        self.asked.update((one.id, one) for one in group)
        self._granted_at.update((one.id, self.steps) for one in group)
        self._bench.add(*group)
        self.check()

    def cancel(self, name: str) -> None:
        """Its blocks are back at once, and its end has its facts."""
        held = self.scheduler._roster.live[name].blocks
        self._bench.cancel(name)
        holders = self._holders()
        pool = self.scheduler._pool
        assert all((pool.holders(block) > 0) == (block in holders) for block in held), f"{name} left blocks behind"
        self.check()

    def read(self, tokens: int) -> None:
        """Every reader takes up to so many tokens."""
        self.scheduler.ack({view.request_id: min(tokens, view.unacknowledged) for view in self.scheduler.views()})

    def limit(self, **changes: int) -> None:
        """Other limits, cut down to the ceilings."""
        ceiling = self._bench.resolved.ceilings()
        self._limits = replace(self._widest, **{name: min(value, ceiling[name]) for name, value in changes.items()})
        self.scheduler.set_limits(self._limits)

    def run_out(self) -> None:
        """The next step of more than one token runs out of memory."""
        self._oom = True

    def step(self) -> StepPlan:
        plan = self._bench.step()
        self.steps += 1
        roster = self.scheduler._roster
        for piece in plan.slices:
            if (sequence := roster.running.get(piece.row)) is not None:
                self._granted_at[sequence.request.id] = self.steps
        self._check_plan(plan, self._limits)
        self.check()
        return plan

    def check(self) -> None:
        """What must be true between any two steps."""
        scheduler = self.scheduler
        pool, roster = scheduler._pool, scheduler._roster
        pool.invariants()
        holders = self._holders()
        assert holders == Counter({block: refs for block, refs in enumerate(pool._refs) if refs}), "references are lost"
        kv = scheduler._kv
        assert set(kv._lent) == set(roster.running.values())
        held = Counter(block for one in kv._lent for block in one.blocks)
        for one, lent in kv._lent.items():
            alone = sum(held[block] == 1 for block in one.blocks)
            assert len(one.blocks) - lent == alone, "what it would give back is miscounted"
        for name, sequence in roster.live.items():
            assert (sequence.state is State.RUNNING) == (sequence.row >= 0) == bool(sequence.blocks), name
            self._check_wait(sequence)
        # An end that a plan brought about is reported by the next commit: after an OutOfMemory, a step later.
        for name in [name for name in self._granted_at if name not in roster.live and name in self._bench.ends]:
            del self._granted_at[name]
            self._check_end(self.asked.pop(name), self._bench.ends.pop(name), self._bench.answers.pop(name, []))
        self._bench.outputs.clear()
        self._bench.plans.clear()

    def drain(self) -> None:
        """Everybody reads, the limits are wide, nobody arrives: then everything ends, and nothing is left."""
        self.limit()
        self._oom = False
        for _ in range(DRAIN_STEPS):
            if not self.scheduler.has_work:
                break
            self.read(1 << 30)
            self.step()
        assert not self.scheduler.has_work, f"no end in sight: {self.scheduler.sizes()}"
        assert not self.asked, "a request has no end"
        assert not self._bench.runner.rows, "the device was not told of an end"
        assert self.scheduler._pool.active == 0, "blocks are lost"
        left = {"pool_free_runs", "pool_ages", "pool_cached", "pool_dirty", "prefixes"}
        assert not {name: size for name, size in self.scheduler.sizes().items() if size and name not in left}

    def _runs_out(self, plan: StepPlan) -> bool:
        due = self._oom and plan.tokens > 1
        self._oom = self._oom and not due
        return due

    def _holders(self) -> Counter[int]:
        running = self.scheduler._roster.running.values()
        return Counter(block for sequence in running for block in sequence.blocks)

    def _check_plan(self, plan: StepPlan, limits: Limits) -> None:
        assert plan.tokens <= limits.max_num_batched_tokens, "the budget of a step is overdrawn"
        assert self.scheduler._pool.active <= limits.kv_blocks, "more blocks are active than the limit allows"
        if plan.admitted:
            before = len(self.scheduler._roster.running) + len(self._bench.ends)
            assert len(plan.slices) <= limits.max_num_seqs or before > limits.max_num_seqs
        resumed = sum(admission.recomputed for admission in plan.why.admitted)
        if plan.why.decode_rows > resumed:  # somebody waited for this step to decode
            prefill = sum(piece.count for piece in plan.slices if piece.count > 1)
            assert prefill <= limits.prefill_chunk, "prefill takes more than its share while others decode"

    def _check_wait(self, sequence: Sequence) -> None:
        """Nobody starves: a running sequence that needs one position gets it within two rounds of the rows, and the
        most urgent that wait are served while others come and go."""
        if sequence.unacked >= self.patience:
            self._granted_at[sequence.request.id] = self.steps
            return
        waited = self.steps - self._granted_at[sequence.request.id]
        if sequence.state is State.RUNNING and sequence.pending == 1:
            assert waited <= 2 * self._bench.resolved.rows + 8, f"{sequence.request.id} starves in its row"
        elif sequence.request.priority == 0:
            assert waited <= _LONGEST_WAIT_STEPS, f"{sequence.request.id} starves"

    def _check_end(self, asked: Request, end: Output, answer: list[int]) -> None:
        alone = lone_run(asked.prompt, asked.sampling)
        assert tuple(answer) == alone[: len(answer)], f"{asked.id} got another answer than it would have got alone"
        if end.finish is FinishReason.STOP:
            assert len(answer) == len(alone)
        facts = end.facts
        assert facts is not None, f"{asked.id} ended without facts"
        stages = facts.queue_ns + facts.prefill_ns + facts.prefill_wait_ns + facts.decode_ns + facts.preempted_ns
        assert stages == facts.emitted_ns - facts.received_ns, f"the stages of {asked.id} do not sum to its life"
