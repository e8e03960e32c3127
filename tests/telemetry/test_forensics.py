"""The verdicts of forensics on recorded and constructed evidence.

Cases marked `fixture` are faults that a machine without an accelerator, or without a control group of its own, cannot
provoke: their evidence has the figures that such a machine would give.
"""

import msgspec
import pytest

from telemetry.evidence import OOM_CAUSES, FailedStep, MemoryFault, ProcessEnd, Reading
from telemetry.forensics import judge_end, judge_memory

MIB = 1 << 20


def reading(free: int | None = 4 * MIB, own: int = 100 * MIB, kv: int = 10 * MIB, **more: object) -> Reading:
    given = {"scope": "process", "limit_bytes": 256 * MIB, "neighbour_bytes": 50 * MIB, **more}
    return msgspec.convert({"free_bytes": free, "own_bytes": own, "kv_bytes": kv, **given}, Reading)


def fault(
    at: Reading,
    *,
    before: Reading | None = None,
    asked: int = 8 * MIB,
    phase: str = "forward",
    tokens: int = 16,
    chunk: int = 1,
) -> MemoryFault:
    step = FailedStep(
        step=7, phase=phase, tokens=tokens, rows=4, request_id="r1", chunk_start=64, chunk_tokens=chunk,
        typical_tokens=16, kv_active=10, kv_blocks=100,
    )  # fmt: skip
    return MemoryFault(requested_bytes=asked, step=step, first=reading(), before=before or reading(), at=at)


CASES = {
    "capacity": fault(reading()),
    "fragmentation": fault(reading(allocator_free_bytes=64 * MIB, largest_free_bytes=65536)),
    "kv_exhausted": fault(reading(kv=40 * MIB)),
    "activation_spike": fault(reading(), tokens=512, chunk=500),
    "logits": fault(reading(), phase="prompt_logprobs", chunk=16),
    "neighbour": fault(reading(scope="device", neighbour_bytes=90 * MIB)),
    "host_cgroup": fault(reading(scope="cgroup")),  # fixture: nothing of ours grew, the group's limit was hit
    "leak": fault(reading(own=160 * MIB), before=reading(own=150 * MIB)),
    "unknown": fault(reading(free=None)),
}


@pytest.mark.parametrize("cause", OOM_CAUSES)
def test_each_cause_is_found_with_evidence_for_it_and_against_every_other(cause: str) -> None:
    verdict = judge_memory(CASES[cause])
    assert verdict.cause == cause
    assert verdict.knobs
    assert {clue.cause for clue in verdict.clues} == set(OOM_CAUSES) - {"unknown"}
    speaking_for = [clue.cause for clue in verdict.clues if clue.speaks == "for"]
    assert speaking_for == ([] if cause == "unknown" else [cause])
    assert "8.0 MiB" in verdict.summary


@pytest.mark.parametrize(("free", "cause"), [(128 << 10, "fragmentation"), (MIB, "unknown")])
def test_a_heap_that_grows_takes_more_than_was_asked_for(free: int, cause: str) -> None:
    """96 KiB were asked for and 128 are left of the address space: too few, since glibc asks for 128 more."""
    at = reading(free, scope="address_space", allocator_free_bytes=32 * MIB, largest_free_bytes=65536)
    assert judge_memory(fault(at, asked=96 << 10, phase="sample")).cause == cause


def test_fixture_fragmentation_of_a_device_allocator() -> None:
    """fixture: CUDA, 3 GiB reserved and unused in pieces of 256 MiB, 512 MiB wanted, 100 MiB left on the device."""
    at = reading(100 * MIB, scope="device", allocator_free_bytes=3072 * MIB, largest_free_bytes=256 * MIB)
    verdict = judge_memory(fault(at, asked=512 * MIB))
    assert verdict.cause == "fragmentation"
    (clue,) = [clue for clue in verdict.clues if clue.speaks == "for"]
    assert "3072.0 MiB" in clue.text
    assert "largest piece 256.0 MiB" in clue.text


def test_growth_that_explains_nothing_is_not_blamed() -> None:
    small = reading(own=100 * MIB + 2 * MIB)
    assert judge_memory(fault(reading(), before=small, phase="logits", chunk=9)).cause == "logits"
    neighbour = reading(neighbour_bytes=90 * MIB)  # it grew, but the limit that was hit is ours alone
    verdict = judge_memory(fault(neighbour))
    assert verdict.cause == "capacity"
    assert any(clue.cause == "neighbour" and "own" in clue.text for clue in verdict.clues)


def test_blocks_take_no_addresses() -> None:
    """The pool is mapped whole at the start: under RLIMIT_AS its growth takes nothing from anybody."""
    verdict = judge_memory(fault(reading(scope="address_space", kv=40 * MIB), tokens=512, chunk=500))
    assert verdict.cause == "activation_spike"
    assert any(clue.cause == "kv_exhausted" and "taken when the engine started" in clue.text for clue in verdict.clues)


def test_who_did_not_say_how_much_was_refused_by_the_limit_if_nothing_was_left() -> None:
    assert judge_memory(fault(reading(free=1024), asked=0)).cause == "capacity"
    assert judge_memory(fault(reading(free=1024), asked=0, before=reading(own=150 * MIB))).cause == "leak"
    assert judge_memory(fault(reading(), asked=0)).cause == "unknown"


def test_the_largest_taker_is_named() -> None:
    at = reading(kv=14 * MIB, own=190 * MIB)
    assert judge_memory(fault(at, before=reading(own=190 * MIB))).cause == "leak"
    assert judge_memory(fault(reading(kv=50 * MIB), before=reading(own=105 * MIB))).cause == "kv_exhausted"


def test_what_was_not_measured_is_said_to_be_unknown_not_denied() -> None:
    verdict = judge_memory(MemoryFault(requested_bytes=0, step=FailedStep(step=1)))
    assert verdict.cause == "unknown"
    assert {clue.cause for clue in verdict.clues if clue.speaks == "unknown"} >= {"capacity", "fragmentation", "leak"}


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (ProcessEnd(process="engine", exit_code=-9, oom_kills=0), "killed"),
        (ProcessEnd(process="engine", exit_code=-9), "killed"),
        (ProcessEnd(process="engine", exit_code=-9, oom_kills=1), "oom_killed"),  # fixture: a kill by a control group
        (ProcessEnd(process="engine", exit_code=-11), "crash"),
        (ProcessEnd(process="engine", exit_code=5), "crash"),
        (ProcessEnd(process="engine", exit_code=-6, lacked_memory=True), "oom"),
        (ProcessEnd(process="both"), "killed"),
        (ProcessEnd(process="both", oom_kills=2), "oom_killed"),  # fixture
        (ProcessEnd(process="engine", stuck_ms=61_000, phase="forward"), "wedged"),
    ],
)
def test_a_process_that_is_gone(end: ProcessEnd, cause: str) -> None:
    verdict = judge_end(end)
    assert verdict.cause == cause
    assert any(clue.speaks == "for" and clue.cause == cause for clue in verdict.clues)


def test_a_bare_sigkill_with_full_memory_is_still_killed_but_says_what_is_likely() -> None:
    verdict = judge_end(ProcessEnd(process="both"), reading(free=MIB))
    assert verdict.cause == "killed"
    assert any(clue.cause == "oom_killed" and clue.speaks == "for" for clue in verdict.clues)
