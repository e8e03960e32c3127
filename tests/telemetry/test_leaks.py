"""The leak detector says what does not come back, once, and nothing of what does."""

import msgspec

from telemetry.events import EngineEnded, EngineStatus, Event, Incident, LimitsView
from telemetry.leaks import LeakDetector

LIMITS = LimitsView(
    max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk=32, max_partial_prefills=2, context_limit=128,
    kv_blocks=64, spec_depth=0,
)  # fmt: skip
IDLE = EngineStatus(
    at_ns=1,
    state="ready",
    progress_ns=1,
    steps=0,
    limits=LIMITS,
    sizes={"sequences": 0, "loop_suspects": 0, "prefixes": 0},
)


class Bench:
    def __init__(self) -> None:
        self.told: list[Event] = []
        self.detector = LeakDetector(self.told.append, least_bytes=1000)
        self.steps = 0

    def idle(self, *, stepped: bool = True, **changes: object) -> None:
        self.steps += 10 * stepped
        self.detector.take([msgspec.structs.replace(IDLE, steps=self.steps, at_ns=self.steps, **changes)])

    def summaries(self) -> list[str]:
        return [event.summary for event in self.told if isinstance(event, Incident)]


def test_blocks_without_an_owner_are_suspected_once() -> None:  # case 7
    b = Bench()
    b.idle(kv_active=3)
    assert b.summaries() == []  # once may be the moment before it is reported
    for _ in range(5):
        b.idle(kv_active=3, stepped=False)
    assert b.summaries() == ["while idle: 3 KV blocks are in use while there is no request"]
    assert [event.kind for event in b.told if isinstance(event, Incident)] == ["leak_suspected"]


def test_blocks_of_requests_and_cached_ones_are_nobodys_leak() -> None:
    b = Bench()
    for _ in range(4):
        b.idle(kv_active=9, running=1)
        b.idle(kv_active=9, sizes={"sequences": 1})  # preempted, or on its way out
        b.idle(kv_active=0, kv_cached=40)
    assert b.summaries() == []


def test_a_map_that_only_grows_is_suspected_and_one_that_comes_back_is_not() -> None:
    b = Bench()
    for number in range(20):
        b.idle(sizes={"sequences": 0, "grows": 20 * number, "breathes": 100 * (number % 3), "prefixes": 50 * number})
    assert b.summaries() == ["while idle: grows grew by 100 entries over 6 idle periods, to 100"]


def test_resident_memory_that_only_grows_is_suspected() -> None:
    b = Bench()
    for number in range(10):
        b.idle(rss_bytes=10_000 + 300 * number)
    assert len(b.summaries()) == 1
    assert "resident_bytes grew by 1500 bytes" in b.summaries()[0]


def test_one_idle_period_is_one_look_and_a_new_engine_starts_afresh() -> None:
    b = Bench()
    for number in range(20):
        b.idle(rss_bytes=10_000 + 300 * number, stepped=False)
    assert b.summaries() == []
    for number in range(4):
        b.idle(rss_bytes=10_000 + 300 * number)
    b.detector.take([EngineEnded(at_ns=1, engine_id="e", cause="killed", detail="")])
    for number in range(4):
        b.idle(rss_bytes=20_000 + 300 * number)
    assert b.summaries() == []
