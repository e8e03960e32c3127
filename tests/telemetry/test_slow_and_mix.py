"""Slow requests are explained in the log; what tokens traffic is made of is told in sums that give nobody away."""

import logging
import random
from pathlib import Path

import pytest

from telemetry.events import Event, RequestRecord, TokenMix
from telemetry.journal import Journal, read
from telemetry.slowlog import SlowLog
from telemetry.tokenmix import BUCKETS, LEAST_REQUESTS, TokenMixer, install_salt

S = 1_000_000_000


def record(seconds: float, **also: object) -> RequestRecord:
    facts = {
        "request_id": "cmpl-1-0",
        "group_id": "mine",
        "index": 0,
        "model": "m",
        "operation": "chat",
        "stream": True,
        "arrival_ns": 5 * S,
        "at_ns": 5 * S + int(seconds * S),
        "stages": {"queue": int(seconds * S) - S, "decode": S},
        "reason": "stop",
        "trace_id": "t" * 32,
    }
    return RequestRecord(**{**facts, **also})  # type: ignore[arg-type]


def test_only_slow_requests_are_logged_and_each_says_where_its_time_went(caplog: pytest.LogCaptureFixture) -> None:
    slow = record(
        12,
        prompt_tokens=900,
        cached_tokens=64,
        prefill_chunks=3,
        output_tokens=40,
        preemptions=2,
        preempted_tokens=800,
        overlaps={"decode_stall": S // 2},
    )
    with caplog.at_level(logging.WARNING, "inferd.slow"):
        SlowLog(10).take([record(9.99), slow])
    (line,) = caplog.records
    said = line.getMessage()
    assert "cmpl-1-0 took 12.00 s: queue 11.00 s, decode 1.00 s" in said
    assert "900 prompt tokens (64 cached) in 3 chunks, 40 output tokens" in said
    assert "stalled it for 0.50 s" in said
    assert "preempted 2 times, 800 tokens computed again" in said
    assert said.endswith("ended with stop")
    assert (line.request_id, line.trace_id) == ("mine", "t" * 32)  # type: ignore[attr-defined]


def mixed(salt: bytes, requests: int, seed: int = 1) -> list[Event]:
    said: list[Event] = []
    mixer, chance = TokenMixer(said.append, salt), random.Random(seed)
    for _ in range(requests):
        mixer.prompt([chance.randrange(50_000) for _ in range(30)])
        mixer.output([chance.randrange(50_000) for _ in range(10)])
        mixer.ended()
    return said


def test_nothing_is_told_of_fewer_than_a_hundred_requests() -> None:
    assert mixed(b"s" * 16, LEAST_REQUESTS - 1) == []
    (mix,) = mixed(b"s" * 16, 2 * LEAST_REQUESTS - 1)
    assert isinstance(mix, TokenMix)
    assert mix.requests == LEAST_REQUESTS
    assert (len(mix.prompt), len(mix.output)) == (BUCKETS, BUCKETS)
    assert (sum(mix.prompt), sum(mix.output)) == (30 * LEAST_REQUESTS, 10 * LEAST_REQUESTS)
    assert max(mix.prompt) < 5 * sum(mix.prompt) / BUCKETS, "random tokens fall everywhere"


def test_the_same_salt_compares_and_another_does_not() -> None:
    (one,), (same,), (other,) = (mixed(salt, LEAST_REQUESTS) for salt in (b"a" * 16, b"a" * 16, b"b" * 16))
    assert isinstance(one, TokenMix)
    assert isinstance(same, TokenMix)
    assert isinstance(other, TokenMix)
    assert one.prompt == same.prompt
    assert one.prompt != other.prompt


def test_the_salt_belongs_to_the_installation(tmp_path: Path) -> None:
    path = tmp_path / "salt"
    salt = install_salt(path)
    assert len(salt) == 16
    assert install_salt(path) == salt
    assert path.stat().st_mode & 0o077 == 0
    assert len(install_salt(tmp_path / "no" / "such" / "salt")) == 16


def test_the_journal_keeps_lengths_and_sums_and_never_a_requests_tokens(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    (mix,) = mixed(b"c" * 16, LEAST_REQUESTS)
    Journal(path).take([record(1, prompt_tokens=123, output_tokens=45, max_tokens=64), mix])
    kept, told = (line.event for line in read(path))
    assert isinstance(kept, RequestRecord)
    assert (kept.prompt_tokens, kept.output_tokens, kept.max_tokens) == (123, 45, 64)
    assert told == mix
