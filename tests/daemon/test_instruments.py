"""The daemon's instruments: sinks are wired, readers see what was published before, a broken sink is counted."""

import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.instruments import Instruments
from telemetry import journal
from telemetry.events import RequestRecord
from tests.served import wait_for


@pytest.fixture(autouse=True)
def no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def silent_collector() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def ended(number: int) -> RequestRecord:
    now = time.monotonic_ns()
    return RequestRecord(
        at_ns=now,
        request_id=f"r{number}",
        group_id=f"g{number}",
        index=0,
        model="m",
        operation="chat",
        stream=False,
        arrival_ns=now - 1_000_000,
        reason="stop",
        stages={},
    )


def test_a_reader_sees_what_was_published_just_before(tmp_path: Path) -> None:
    with Instruments("m", tmp_path, "1") as instruments:
        for number in range(20):
            instruments.publish(ended(number))
            wait_for(lambda number=number: instruments.record(f"r{number}"), 60, "its record")  # at once, if not busy
        body, _ = instruments.render("")
        assert b'reason="stop"} 20' in body


def test_ended_requests_are_in_the_journal_and_no_trace_sink_exists_unasked(tmp_path: Path) -> None:
    with Instruments("m", tmp_path, "1") as instruments:
        instruments.publish(ended(1))
        body, _ = instruments.render("")
    kept = [line.event for line in journal.read(tmp_path / "journal.jsonl")]
    assert [event.request_id for event in kept if isinstance(event, RequestRecord)] == ["r1"]
    for sink in (b"journal", b"recorder", b"bundle"):  # the alert on a full disk names these
        assert b'sink="%s"' % sink in body
    assert b'sink="trace"' not in body


def test_a_journal_that_cannot_be_written_is_counted_and_nothing_else_suffers(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    with Instruments("m", tmp_path, "1") as instruments:
        instruments.publish(ended(1))
        wait_for(lambda: instruments.record("r1"), 60, "its record")
        deadline = time.monotonic() + 60
        while not re.search(rb'dropped_total\{[^}]*sink="journal"[^}]*\} 1(\.0)?\n', instruments.render("")[0]):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_collector_that_never_answers_delays_no_publisher_and_no_reader(
    tmp_path: Path, silent_collector: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent_collector}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with Instruments("m", tmp_path, "1") as instruments:
        began = time.monotonic()
        for number in range(1000):
            instruments.publish(ended(number))
        wait_for(lambda: instruments.record("r999"), 20, "its record")
        assert b'sink="trace"' in instruments.render("")[0]
        assert time.monotonic() - began < 30  # a publisher that waited would need a second for each
