"""Ages of KV blocks: what the pool tells, and that it reaches the metrics."""

import struct

from engine.kv.ages import BlockAges
from engine.kv.pool import BlockPool
from telemetry import events
from telemetry.fold import Fold
from tests.fakes.scheduling import Bench, ceilings, request, widest

MS = 1_000_000


def ms(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


def test_a_block_is_taken_idles_is_used_again_and_is_evicted() -> None:
    ages = BlockAges(4)
    pool = BlockPool(4, lambda _: None, ages)
    ages.now_ns = 10 * MS
    blocks = pool.take(2)
    pool.name(blocks[0])
    ages.now_ns = 30 * MS
    pool.release(blocks)
    assert {kind: ms(packed) for kind, packed in ages.drain().items()} == {"lifetime": [20]}, "the nameless one is free"
    ages.now_ns = 70 * MS
    pool.share(blocks[:1])
    assert {kind: ms(packed) for kind, packed in ages.drain().items()} == {"reuse_gap": [40]}
    ages.now_ns = 80 * MS
    pool.release(blocks[:1])
    ages.now_ns = 180 * MS
    pool.take(4)
    found = {kind: ms(packed) for kind, packed in ages.drain().items()}
    assert found == {"lifetime": [170], "idle_before_evict": [100]}
    assert ages.drain() == {}, "they are handed out once"


def test_in_a_large_pool_only_a_sample_is_looked_at_and_maps_stay_small() -> None:
    ages = BlockAges(1 << 16)
    pool = BlockPool(1 << 16, lambda _: None, ages)
    pool.release(pool.take(1 << 16))
    assert len(ms(ages.drain()["lifetime"])) == 512
    assert ages.sizes() == {"pool_ages": 0}


def test_a_scheduler_under_pressure_yields_all_three_and_the_fold_keeps_them() -> None:
    resolved = ceilings(rows=4, kv_blocks=24, block_size=4)
    bench = Bench(resolved, widest(resolved))
    for i in range(12):
        bench.add(request(f"r{i}", tuple(range(100 * (i % 4), 100 * (i % 4) + 21)), tokens=6))
        bench.drain()
    packed = bench.scheduler.block_ages()
    assert set(packed) == set(events.BLOCK_AGES)
    limits = events.LimitsView(
        max_num_seqs=1,
        max_num_batched_tokens=1,
        prefill_chunk=1,
        max_partial_prefills=1,
        context_limit=1,
        kv_blocks=1,
        spec_depth=0,
    )
    status = events.EngineStatus(
        at_ns=1, state="ready", progress_ns=1, steps=1, limits=limits, sizes={}, block_ages_ms=packed
    )
    fold = Fold("m")
    fold.take([status, status])
    with fold.reading() as state:
        assert {kind: held.count for kind, held in state.block_ages.items()} == {
            kind: 2 * len(ms(ages)) for kind, ages in packed.items()
        }
