"""The engine's own events, folded: the figures agree with what the engine did, merged on the way or not."""

import random

from engine import wire
from engine.loop import Engine
from engine.outbox import Outbox
from engine.output import Output
from engine.scheduler import Scheduler
from telemetry.bus import Bus
from telemetry.events import STEP_PHASES, Event
from telemetry.exposition import Exposition
from telemetry.fold import Fold
from telemetry.state import State
from tests.fakes.runner import FakeRunner
from tests.fakes.scheduling import ceilings, request, widest


def serve(publish_to: list[Event]) -> list[Output]:
    """Forty requests with a shared prefix, some cancelled, in too few blocks."""
    resolved = ceilings(rows=6, kv_blocks=40, block_size=4)
    scheduler = Scheduler(resolved, widest(resolved, max_num_batched_tokens=32), cache_root="t", output_credit=1 << 30)
    engine = Engine(scheduler, FakeRunner(4), publish_to.append)
    chance, shared = random.Random(8), tuple(range(17))
    outputs: list[Output] = []
    for i in range(40):
        prompt = (*shared, *(chance.randrange(900) for _ in range(chance.randrange(1, 20))))
        outputs += engine.submit([request(f"r{i}", prompt, tokens=chance.randrange(1, 30))])
        if chance.random() < 0.3:
            outputs += engine.step()
        if i % 9 == 8:
            outputs += engine.cancel([f"r{i}"], "abort")
    for _ in range(2000):
        if not engine.has_work:
            break
        outputs += engine.step()
    assert not engine.has_work
    return outputs


def counters(state: State) -> dict[str, object]:
    return {
        "tokens": state.step_tokens,
        "prefix": state.prefix,
        "preemptions": (state.preemptions, state.preempted_tokens),
        "steps": state.iteration_tokens.count,
        "gaps": state.gap.counts,
        "phases": {phase: round(state.phases[phase].sum, 6) for phase in STEP_PHASES},
    }


def test_what_the_fold_counts_is_what_the_engine_did() -> None:
    said: list[Event] = []
    outputs = serve(said)
    fold = Fold("m")
    bus = Bus(None, {"fold": fold.take})
    for event in said:
        bus.publish(event)
    assert bus.flush()
    bus.close()
    with fold.reading() as state:
        assert state.unfolded == 0
        assert state.blocks is not None
        assert (state.blocks.active, state.queue.running, state.queue.waiting) == (0, 0, 0)
        assert state.blocks.total == 40
        lost = sum(state.preempted_tokens.values())
        assert sum(state.preemptions.values()) > 0, (
            "the pool is too small for this load: somebody must have been preempted"
        )
        assert 0 < state.step_tokens["recompute"] <= lost
        assert state.prefix["hit"] > 0
        # Every token after a choice's first has a gap; a choice has one token at most without one.
        given = sum(len(output.tokens) for output in outputs)
        started = {output.request_id for output in outputs if output.tokens}
        assert state.gap.count == given - len(started)
    exposition = Exposition(fold)
    exposition.render()
    assert exposition.row_errors == 0


def test_reports_merged_under_load_count_the_same() -> None:
    said: list[Event] = []
    serve(said)
    frames: list[bytes] = []
    room = iter([False] * 60 + [True] * 100_000)

    def post(frame: bytes) -> bool:
        taken = next(room)
        if taken:
            frames.append(frame)
        return taken

    outbox = Outbox(post, capacity=8)
    for event in said:
        outbox.put(event)
        outbox.flush()
    outbox.flush()
    merged = [event for frame in frames for event in wire.decode_events(frame)]
    assert outbox.dropped == 0
    assert len(merged) < len(said)
    apart, together = Fold("m"), Fold("m")
    apart.take(said)
    together.take(merged)
    with apart.reading() as a, together.reading() as b:
        assert counters(a) == counters(b)
        assert a.blocks == b.blocks
        assert a.queue == b.queue
