"""The loop: the five verbs partition a step, what it publishes adds up, and the ladder that OutOfMemory climbs."""

import argparse
import itertools
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from engine.config import EngineConfig
from engine.errors import EngineFault, OutOfMemory
from engine.loop import Engine
from engine.output import Output
from engine.plan import StepPlan, StepResult
from engine.request import FinishReason, Request
from engine.scheduler import Scheduler
from telemetry.events import Event, Incident, StepReport
from tests.fakes.engine_main import FaultyRunner, fake_resolved, options
from tests.fakes.runner import lone_run
from tests.fakes.sessions import request


@dataclass
class Clock:
    """Every look at it costs a microsecond, so that every phase has a length."""

    now_ns: int = 1_000_000_000

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns


class CostlyRunner(FaultyRunner):
    """A device on which every token costs a microsecond of the clock."""

    def __init__(self, planted: argparse.Namespace, block_size: int, clock: Clock) -> None:
        super().__init__(planted, block_size)
        self._clock = clock
        self._tokens = 0

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        self._tokens = plan.tokens

    def collect(self) -> StepResult:
        self._clock.now_ns += 1000 * self._tokens
        return super().collect()


@dataclass
class Bench:
    """An engine with a fake device, a clock of its own, and all it said."""

    engine: Engine
    clock: Clock
    events: list[Event] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    def run(self, most_steps: int = 10_000, until: Callable[[], bool] = lambda: False) -> None:
        """Step until there is nothing to do."""
        for _ in range(most_steps):
            if until() or not self.engine.has_work:
                return
            outputs = self.engine.step()
            self.outputs += outputs
            self.engine.ack({output.request_id: len(output.tokens) for output in outputs})
        raise AssertionError(f"still busy after {most_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [token for o in self.outputs if o.request_id == request_id for token in o.tokens]

    def end(self, request_id: str) -> Output:
        (end,) = [o for o in self.outputs if o.request_id == request_id and o.finish is not None]
        return end

    def reports(self) -> list[StepReport]:
        return [event for event in self.events if isinstance(event, StepReport)]

    def incidents(self) -> list[Incident]:
        return [event for event in self.events if isinstance(event, Incident)]


def bench(kv_blocks: int = 256, rows: int = 16, **faults: float) -> Bench:
    resolved, limits = fake_resolved(EngineConfig(model_dir="none"), kv_blocks=kv_blocks, rows=rows)
    planted: argparse.Namespace = options([f"--{name.replace('_', '-')}={value}" for name, value in faults.items()])
    clock, events = Clock(), list[Event]()
    scheduler = Scheduler(resolved, limits, cache_root="test", output_credit=256)
    return Bench(
        Engine(scheduler, CostlyRunner(planted, resolved.block_size, clock), events.append, clock), clock, events
    )


def prompts(count: int, length: int = 40, max_tokens: int = 6) -> list[Request]:
    return [request(f"r{i}", max_tokens, prompt=range(i * 1000, i * 1000 + length)) for i in range(count)]


def test_the_phases_partition_each_step_and_publish_is_the_one_befores() -> None:
    b = bench()
    b.engine.submit(prompts(3))
    b.run()
    reports = b.reports()
    assert len(reports) >= 6
    for before, after in itertools.pairwise(reports):
        host_ns = before.plan_ns + before.launch_ns + before.collect_ns + before.commit_ns
        assert min(before.plan_ns, before.launch_ns, before.collect_ns, before.commit_ns, after.publish_ns) > 0
        assert before.at_ns + host_ns + after.publish_ns <= after.at_ns


def test_what_is_published_adds_up_to_what_was_done() -> None:
    b = bench()
    b.engine.submit(prompts(3, length=40, max_tokens=6))
    b.run()
    reports = b.reports()
    assert sum(r.prefill_tokens for r in reports) == 3 * 40
    assert sum(r.decode_tokens for r in reports) == 3 * 5
    assert sum(len(array("I", r.gaps_us)) for r in reports) == 3 * 5
    assert sum(r.prefix_miss_tokens + r.prefix_hit_tokens for r in reports) <= 3 * 40
    rows = [array("i", r.rows).tolist() for r in reports]
    assert sum(count for row in rows for count in row[2::3]) == 3 * 45
    assert sorted(name for r in reports for name in r.finished) == ["r0", "r1", "r2"]
    assert sorted(name for r in reports for _, name in r.admitted) == ["r0", "r1", "r2"]
    last = reports[-1]
    assert (last.running, last.waiting, last.kv_active) == (0, 0, 0)
    assert set(b.engine.sizes()) >= {"loop_last_token", "loop_stall_base", "loop_suspects"}
    assert not [name for name, size in b.engine.sizes().items() if size and name.startswith("loop_")]


def test_cancel_frees_the_blocks_at_once_and_says_the_last_word() -> None:
    b = bench()
    b.engine.submit(prompts(2, max_tokens=1000))
    b.run(until=lambda: len(b.tokens("r0")) > 3)
    (end,) = b.engine.cancel(["r0", "unknown"], FinishReason.ABORT)
    assert (end.request_id, end.finish) == ("r0", FinishReason.ABORT)
    assert end.facts is not None
    b.outputs += b.engine.step()
    assert b.reports()[-1].running == 1
    (other,) = b.engine.abort_all()
    assert other.request_id == "r1"
    b.run()  # the device still has to be told
    assert b.engine.scheduler.views() == []
    assert b.engine.scheduler.state_facts().kv_active == 0


def test_when_nothing_can_be_granted_it_says_so_until_something_changes() -> None:
    b = bench()
    b.engine.submit([request("silent", 1000)])
    while not b.engine.starved:
        b.engine.step()
    published = len(b.events)
    assert b.engine.step() == []
    assert len(b.events) == published  # an idle look is no step
    b.engine.ack({"silent": 10})
    assert not b.engine.starved
    assert len(b.engine.step()[0].tokens) == 1


def test_one_oom_drops_the_step_and_everybody_still_gets_the_right_tokens() -> None:
    b = bench(oom_once_at_step=2)
    requests = prompts(4, length=100)
    b.engine.submit(requests)
    b.run()
    for r in requests:
        assert tuple(b.tokens(r.id)) == lone_run(r.prompt, r.sampling)
        assert b.end(r.id).finish is FinishReason.LENGTH
    (incident,) = b.incidents()
    assert incident.kind == "oom"
    assert [p.cause for r in b.reports() for p in r.preemptions] == ["oom"]


def test_the_request_that_needs_too_much_fails_alone_and_typed() -> None:
    b = bench(oom_over_request_tokens=200)
    b.engine.submit([*prompts(3, length=20, max_tokens=30), request("huge", 5, prompt=range(9000, 9400))])
    b.run()
    assert (b.end("huge").finish, b.end("huge").error_code) == (FinishReason.ERROR, "out_of_memory")
    for i in range(3):
        assert b.end(f"r{i}").finish is FinishReason.LENGTH
        assert len(b.tokens(f"r{i}")) == 30
    assert {name for incident in b.incidents() for name in incident.request_ids} == {"huge"}
    assert b.engine.scheduler.state_facts().kv_active == 0


def test_case_1_prompt_logprobs_fail_their_request_alone_with_50_others_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device says which row's memory it asked for, and in which phase."""
    b = bench(rows=64, kv_blocks=1024)
    launch = CostlyRunner.launch

    def short_of_memory(runner: CostlyRunner, plan: StepPlan) -> None:
        inner = runner._inner
        rows = {row: init.request_id for row, init in inner.rows.items()}
        rows |= {init.row: init.request_id for init in plan.admitted}
        greedy = [piece.row for piece in plan.slices if rows[piece.row] == "greedy"]
        inner.oom = lambda _: bool(greedy)
        try:
            launch(runner, plan)
        except OutOfMemory as error:
            error.phase, error.row = "prompt_logprobs", greedy[0]
            raise

    monkeypatch.setattr(CostlyRunner, "launch", short_of_memory)
    b.engine.submit(prompts(50, length=20, max_tokens=30))
    b.run(until=lambda: len(b.tokens("r49")) > 3)
    b.engine.submit([request("greedy", 5, prompt=range(90_000, 90_040))])
    b.run()
    assert (b.end("greedy").finish, b.end("greedy").error_code) == (FinishReason.ERROR, "out_of_memory")
    assert "logits" in b.end("greedy").error
    for i in range(50):
        assert len(b.tokens(f"r{i}")) == 30, "the others never notice"
        assert b.end(f"r{i}").finish is FinishReason.LENGTH
    assert {incident.cause for incident in b.incidents()} == {"logits"}
    assert {name for incident in b.incidents() for name in incident.request_ids} == {"greedy"}


@pytest.mark.parametrize(("broken", "fails"), [((5, 9), False), ((5, 7, 9, 11), True)])
def test_who_was_the_largest_part_of_steps_that_broke_for_another_reason_fails_only_in_the_end(
    broken: tuple[int, ...], fails: bool
) -> None:
    """A neighbour, a heap in pieces: it is nobody's doing, but a request must not be tried for ever either."""
    b = bench()
    b.engine._runner._inner.oom = lambda plan: plan.step in broken  # type: ignore[attr-defined]
    b.engine.submit(prompts(1, length=600, max_tokens=30))
    b.run()
    assert {incident.cause for incident in b.incidents()} <= {"capacity", "unknown"}
    assert len(b.incidents()) == len(broken)
    assert (b.end("r0").finish is FinishReason.ERROR) is fails


def test_only_a_third_failure_in_a_row_is_a_fault_of_the_engine() -> None:
    b = bench(oom_from_step=3)
    b.engine.submit(prompts(6, max_tokens=1000))
    with pytest.raises(EngineFault, match="out of memory in 3 steps in a row"):
        b.run()
    assert len(b.incidents()) == 3
    failed = [o for o in b.outputs if o.finish is not None]
    assert [o.error_code for o in failed] == ["out_of_memory"]


def test_decoding_is_told_how_long_prompts_held_it_up() -> None:
    b = bench()
    b.engine.submit(prompts(1, max_tokens=200))
    b.run(until=lambda: len(b.tokens("r0")) > 20)
    b.engine.submit([request("long", 1, prompt=range(5000, 7000))])
    b.run()
    facts = b.end("r0").facts
    assert facts is not None
    held_up_ns = 2000 * 1000  # each token of the long prompt, but for those that came after r0's end
    assert 0 < facts.decode_stall_ns <= held_up_ns + 10_000
    assert facts.decode_stall_ns < facts.decode_ns
