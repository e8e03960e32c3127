"""What the scheduler promises for one or a few requests; the fake device checks every step for itself."""

from engine.request import FinishReason
from tests.fakes.runner import lone_run
from tests.fakes.scheduling import Bench, ceilings, request, widest


def bench(credit: int = 1 << 30, **shape: int | bool) -> Bench:
    limits = {k: shape.pop(k) for k in list(shape) if k in ("prefill_chunk", "max_partial_prefills", "context_limit")}
    resolved = ceilings(**shape)
    return Bench(resolved, widest(resolved, **limits), credit)


def test_one_request_gets_its_tokens_and_its_facts_partition_its_life() -> None:
    it = bench()
    asked = request("a", 10, 5)
    it.add(asked)
    it.drain()
    end = it.ends["a"]
    assert tuple(it.answers["a"]) == lone_run(asked.prompt, asked.sampling)
    assert end.finish is FinishReason.LENGTH
    facts = end.facts
    assert facts is not None
    stages = facts.queue_ns + facts.prefill_ns + facts.prefill_wait_ns + facts.decode_ns + facts.preempted_ns
    assert stages == facts.emitted_ns - facts.received_ns
    assert facts.prefill_ns > 0
    assert facts.decode_ns > 0
    assert facts.preempted_ns == 0
