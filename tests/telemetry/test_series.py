"""Series: no client can make one, no counter goes back when an engine is replaced, and no gauge outlives its engine."""

import asyncio
import json
import logging
import random
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import parser
from prometheus_client.samples import Sample

from telemetry import events
from telemetry.exposition import Exposition, rows
from telemetry.fold import Fold
from tests.fakes.daemon import running
from tests.fakes.port import saying

STRANGERS = 10_000
AT_ONCE = 8
KINDS = ("model", "key", "path", "scrape", "key", "path", "model", "served")
S = 1_000_000_000


def series(body: bytes) -> dict[str, float]:
    """Every series of a scrape: name and labels → value."""
    found = {}
    for family in parser.text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            found[f"{sample.name}{sorted(sample.labels.items())}"] = sample.value
    return found


def stranger(number: int) -> bytes:
    """A request of somebody who sends random names wherever a name can be sent."""
    word = secrets.token_urlsafe(12)
    kind = KINDS[number % len(KINDS)]
    path = {"path": f"/v1/{word}", "scrape": f"/{word}/metrics?{word}={word}"}.get(kind, "/v1/completions")
    body = json.dumps({"model": "tiny" if kind == "served" else word, "prompt": word, "user": word, "max_tokens": 2})
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {word if kind == 'key' else 'sk-right'}",
        f"X-Request-Id: {word}",
        f"User-Agent: {word}",
        f"{word.strip('-_')}: {word}",
        f"traceparent: 00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01",
        f"Content-Length: {len(body)}",
        "Content-Type: application/json",
    ]
    return "\r\n".join([*lines, "", body]).encode()


async def strangers(port: int, count: int) -> Counter[int]:
    """So many of them, pipelined on one connection; how often each status was the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(stranger(number) for number in range(count)))
    seen: Counter[int] = Counter()
    while seen.total() < count:
        line = await asyncio.wait_for(reader.readline(), 60)
        assert line, f"the connection ended after {seen.total()} answers"
        if found := re.search(rb"HTTP/1.1 (\d+)", line):  # a body ends without a line's end
            seen[int(found[1])] += 1
    writer.close()
    return seen


async def test_ten_thousand_strangers_add_no_series(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "inferd.api")
    async with running(tmp_path, saying("ok"), settings={"api_key": "sk-right"}) as made:
        port = int(made.addresses.api.rpartition(":")[2])
        await strangers(port, 8 * len(KINDS))  # of every kind: what is counted is there once
        async with asyncio.timeout(60):  # a loop's lag has its series from its first sample on
            while (text := (await made.get("/metrics"))[1]).count(b'loop="control"') * text.count(b'loop="api"') == 0:
                await asyncio.sleep(0.05)
        before = series((await made.get("/metrics"))[1])
        seen = await asyncio.gather(*(strangers(port, STRANGERS // AT_ONCE) for _ in range(AT_ONCE)))
        after = series((await made.get("/metrics"))[1])
    assert set(sum(seen, Counter())) == {200, 401, 404}
    assert set(after) == set(before)
    ended = sum(value for name, value in after.items() if name.startswith("inferd_requests_finished_total"))
    assert ended >= STRANGERS / len(KINDS) * 2
    sizes = {name: value for name, value in after.items() if name.startswith("inferd_map_entries")}
    assert sizes and max(sizes.values()) <= 4096


def a_life(chance: random.Random, engine_id: str, at_ns: int) -> Iterator[events.Event]:
    """What one engine says from its start to its death: its own totals begin at zero again."""
    limits = events.LimitsView(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        prefill_chunk=64,
        max_partial_prefills=1,
        context_limit=512,
        kv_blocks=64,
        spec_depth=0,
    )
    yield events.EngineStarted(
        at_ns=at_ns,
        engine_id=engine_id,
        pid=7,
        restarts=0,
        phases={"total": S},
        resolved={"block_size": 16},
        reasons={},
        limits=limits,
    )
    cpu_ns = dropped = 0
    for step in range(chance.randrange(1, 6)):
        at_ns += S // 10
        cpu_ns += chance.randrange(S)
        dropped += chance.randrange(3)
        yield events.StepReport(
            at_ns=at_ns,
            step=step,
            collect_ns=chance.randrange(S // 50),
            prefill_tokens=chance.randrange(64),
            decode_tokens=2,
            running=2,
            kv_active=8,
            kv_free=56,
            prefix_hit_tokens=16,
            preemptions=(events.Preempted("r", 48, "kv"),),
            gaps_us=chance.randrange(1, 10**6).to_bytes(4, "little"),
        )
        yield events.EngineStatus(
            at_ns=at_ns,
            state="ready",
            progress_ns=at_ns,
            steps=step,
            limits=limits,
            sizes={"outbox": 3},
            cpu_ns=cpu_ns,
            rss_bytes=1 << 30,
            running=2,
            kv_active=8,
            kv_free=56,
            telemetry_dropped=dropped,
        )
        memory = {"weights": 500}
        yield events.MemoryReport(
            at_ns=at_ns, process="engine", device="cpu", booked=memory, measured={}, limit_bytes=9000
        )
    yield events.EngineEnded(at_ns=at_ns + 1, engine_id=engine_id, cause="killed", detail="")


def samples(fold: Fold) -> dict[str, Sample]:
    body = Exposition(fold, rows(legacy=True)).render()[0].decode()
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample
        for family in parser.text_string_to_metric_families(body)
        for sample in family.samples
    }


COUNTS = ("_total", "_count", "_sum", "_bucket")
# What only a living engine can say; the rest of the gauges are the daemon's own.
ENGINES_OWN = re.compile(
    "inferd_kv_blocks|kv_cache_usage|kv_fragmentation|progress_age|snapshot_age|resident_bytes.*'engine'\\)|map_entries"
)


@pytest.mark.parametrize("seed", range(2))
def test_counters_never_go_back_and_gauges_end_with_their_engine(seed: int) -> None:
    chance = random.Random(seed)
    fold = Fold("m", clock=lambda: 100 * S)
    before = samples(fold)
    for life in range(4):
        for event in a_life(chance, f"e{life}", (1 + 10 * life) * S):
            fold.take([event])
            now = samples(fold)
            for name, sample in before.items():
                if sample.name.endswith(COUNTS) and sample.name != "vllm:iteration_tokens_total":
                    assert name in now, f"{name} went away"
                    assert now[name].value >= sample.value, name
            before = now
        for name, sample in before.items():
            if sample.name.endswith(COUNTS):
                continue
            assert not ENGINES_OWN.search(name), f"a ghost: {name}"
            if "num_requests" in name or sample.name == "inferd_requests":
                assert sample.value == 0, name
    restarts = [s.value for s in before.values() if s.name == "inferd_engine_restarts_total"]
    assert sum(restarts) == 3
