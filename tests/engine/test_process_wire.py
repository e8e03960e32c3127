"""Messages and telemetry between the processes: round trips, garbage, merging under load, counted loss."""

import random
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import wire
from engine.outbox import Outbox
from engine.output import Output
from engine.report import merged
from engine.request import EngineFacts, FinishReason, Request, SamplingParams, TokenLogprob
from telemetry.events import EngineStatus, Incident, LimitsView, StepReport

OUTPUT = Output(
    request_id="r",
    tokens=(1, 2),
    logprobs=(TokenLogprob(1, -0.5, 1, ((1, -0.5), (3, -1.0))),),
    prompt_logprobs=(None, TokenLogprob(2, -3.0, 9)),
    finish=FinishReason.STOP,
    stop_token=0,
    facts=EngineFacts(received_ns=1, emitted_ns=2),
    at_ns=3,
)
REQUEST = Request(id="r", prompt=(1, 2), sampling=SamplingParams(max_tokens=3, logit_bias=((4, -1.5),)), deadline_ns=7)
VIEW = LimitsView(
    max_num_seqs=1,
    max_num_batched_tokens=1,
    prefill_chunk=1,
    max_partial_prefills=1,
    context_limit=1,
    kv_blocks=1,
    spec_depth=0,
)


def report(step: int, **fields: int) -> StepReport:
    return StepReport(
        at_ns=step * 100,
        step=step,
        plan_ns=1,
        decode_tokens=2,
        running=step,
        gaps_us=array("I", [step]).tobytes(),
        finished=(f"r{step}",),
        **fields,
    )


def status(at_ns: int) -> EngineStatus:
    return EngineStatus(at_ns=at_ns, state="ready", progress_ns=0, steps=0, limits=VIEW, sizes={})


@pytest.mark.parametrize("command", [wire.Submit(requests=[REQUEST]), wire.Ack(taken={"r": 3}), wire.Drain()])
def test_commands_round_trip(command: wire.Command) -> None:
    assert wire.decode_command(wire.encode(command)) == command


@pytest.mark.parametrize("reply", [wire.Outputs(outputs=[OUTPUT]), wire.Answer(token=1, value={"a": [b"x"]})])
def test_replies_round_trip(reply: wire.Reply) -> None:
    assert wire.decode_reply(wire.encode(reply)) == reply


@given(st.binary(max_size=200))
def test_garbage_is_a_decode_error_and_nothing_else(frame: bytes) -> None:
    for decode in (wire.decode_command, wire.decode_reply, wire.decode_events):
        try:
            decode(frame)
        except msgspec.DecodeError:
            continue


def test_mangled_commands_are_a_decode_error_and_nothing_else() -> None:
    generator = random.Random(1)
    good = wire.encode(wire.Submit(requests=[REQUEST]))
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(generator.randint(1, 6)):
            bad[generator.randrange(len(bad))] = generator.randrange(256)
        try:
            wire.decode_command(bytes(bad[: generator.randint(1, len(bad))]))
        except msgspec.DecodeError:
            continue


def test_a_merged_report_adds_its_sums_and_keeps_the_last_gauges() -> None:
    both = merged(report(1, memory_peak_bytes=9), report(2, memory_peak_bytes=4))
    assert (both.merged, both.at_ns, both.step) == (2, 100, 2)
    assert (both.plan_ns, both.decode_tokens) == (2, 4)
    assert both.running == 2
    assert both.memory_peak_bytes == 9
    assert both.finished == ("r1", "r2")
    assert array("I", both.gaps_us).tolist() == [1, 2]


def test_every_number_of_a_report_is_a_known_sum_or_a_known_gauge() -> None:
    gauges = {
        "at_ns",
        "step",
        "running",
        "waiting",
        "preempted_now",
        "waiting_capacity",
        "waiting_kv",
        "waiting_budget",
        "kv_active",
        "kv_cached",
        "kv_free",
        "kv_tail_slots",
        "kv_stranded_blocks",
        "memory_peak_bytes",
        "longest_gap_us",  # a maximum, like the peak
    }
    numbers = {f.name for f in msgspec.structs.fields(StepReport) if f.type is int}
    doubled = merged(StepReport(**dict.fromkeys(numbers, 1)), StepReport(**dict.fromkeys(numbers, 1)))
    assert {name for name in numbers if getattr(doubled, name) == 1} == gauges


def test_what_cannot_be_sent_is_merged_and_nothing_is_lost() -> None:
    sent: list[bytes] = []
    room = False

    def post(frame: bytes) -> bool:
        if room:
            sent.append(frame)
        return room

    outbox = Outbox(post, capacity=8)
    incident = Incident(at_ns=1, incident_id="i", kind="oom", cause="unknown", summary="")
    outbox.put(incident)
    for step in range(1, 101):
        outbox.put(report(step))
        outbox.put(status(step))
        outbox.flush()
        assert len(outbox) <= 9
    room = True
    outbox.flush()
    events = wire.decode_events(sent[0])
    reports = [event for event in events if isinstance(event, StepReport)]
    assert sum(event.merged for event in reports) == 100
    assert sum(event.decode_tokens for event in reports) == 200
    assert b"".join(event.gaps_us for event in reports) == array("I", range(1, 101)).tobytes()
    assert incident in events
    assert outbox.dropped == 0
    assert len(outbox) == 0


def test_step_reports_wait_for_each_other_and_nothing_else_waits() -> None:
    sent: list[bytes] = []
    outbox = Outbox(lambda frame: not sent.append(frame))
    outbox.put(report(1))
    outbox.flush(report(1).at_ns)
    outbox.put(report(2))
    outbox.flush(report(1).at_ns + 199_000_000)
    assert (len(sent), len(outbox)) == (0, 2)
    outbox.flush(report(1).at_ns + 200_000_000)
    assert (len(wire.decode_events(sent[0])), len(outbox)) == (2, 0)
    outbox.put(report(3))
    outbox.put(status(3))
    outbox.flush(report(3).at_ns)
    assert len(wire.decode_events(sent[1])) == 2
    outbox.put(report(4))
    outbox.flush()
    assert len(sent) == 3, "an idle engine sends what it has"


def test_what_can_neither_be_sent_nor_merged_is_dropped_and_counted() -> None:
    outbox = Outbox(lambda _: False, capacity=8)
    for number in range(100):
        outbox.put(Incident(at_ns=number, incident_id="i", kind="oom", cause="unknown", summary=""))
    assert len(outbox) <= 9
    assert outbox.dropped == 100 - len(outbox)
