"""BlockPool: who holds what, where a table lies, what is evicted and what is given back."""

import random

import pytest

from engine.kv.pool import BlockPool


def pool(blocks: int = 16) -> tuple[BlockPool, list[int]]:
    """A pool and the list of blocks whose names died."""
    evicted: list[int] = []
    return BlockPool(blocks, evicted.append), evicted


def named(it: BlockPool, count: int) -> list[int]:
    """Cached blocks: taken, named, released."""
    blocks = it.take(count)
    for block in blocks:
        it.name(block)
    it.release(blocks)
    return blocks


def test_a_table_goes_on_where_it_ends() -> None:
    it, _ = pool()
    first = it.take(3, expected=5)
    other = it.take(2, expected=2)
    assert it.take(2, first[-1]) == [first[-1] + 1, first[-1] + 2]
    assert not set(first) & set(other)
    it.invariants()


def test_a_new_table_leaves_room_for_the_one_before_and_finds_room_for_itself() -> None:
    it, _ = pool(64)
    tables = [it.take(1, expected=16) for _ in range(4)]
    for _ in range(15):
        for table in tables:
            table += it.take(1, table[-1])
    for table in tables:
        assert table == list(range(table[0], table[0] + 16))


def test_every_block_can_be_taken_whatever_the_fragmentation() -> None:
    it, _ = pool(16)
    blocks = it.take(16)
    it.release(blocks[::2])
    assert sorted(it.take(8, expected=8)) == sorted(blocks[::2])
    assert it.available == 0
    with pytest.raises(ValueError, match="0 are available"):
        it.take(1)


def test_tables_lie_in_one_run_even_in_a_pool_that_is_full_of_cached_blocks() -> None:
    it, _ = pool(512)
    rng = random.Random(3)
    tables: list[tuple[list[int], int]] = []
    whole = total = 0
    for step in range(4000):
        if len(tables) < 8 and step % 7 == 0:
            need = rng.randint(4, 30)
            tables.append((it.take(need // 2, expected=need), need))
        for table, need in tables:
            if len(table) < need and rng.random() < 0.2:
                table += it.take(1, table[-1], need - len(table))
        for ended in [one for one in tables if len(one[0]) >= one[1]]:
            tables.remove(ended)
            blocks = ended[0]
            if step > 1000:
                total += 1
                whole += blocks == list(range(blocks[0], blocks[0] + len(blocks)))
            for block in blocks:
                it.name(block)
            it.release(blocks)
    assert it.cached > 100
    assert whole > total * 2 / 3 > 0  # without the evictions beyond the need: none


def test_what_nobody_holds_is_cached_if_named_and_else_free() -> None:
    it, evicted = pool(8)
    kept = named(it, 3)
    it.release(it.take(2))
    assert (it.active, it.cached, it.free) == (0, 3, 5)
    it.share(kept[:1])
    assert (it.active, it.cached, it.free) == (1, 2, 5)
    assert evicted == []
    it.invariants()


def test_free_blocks_are_used_before_cached_ones_and_the_tail_of_a_prefix_is_evicted_first() -> None:
    it, evicted = pool(8)
    old, recent = named(it, 3), named(it, 2)
    it.take(4)
    assert evicted == [old[2]]
    it.take(4)
    assert evicted == [old[2], old[1], old[0], recent[1], recent[0]]
    it.invariants()


def test_a_used_prefix_is_evicted_later() -> None:
    it, evicted = pool(4)
    first, second = named(it, 2), named(it, 2)
    it.share(first)
    it.release(first)
    it.take(2)
    assert evicted == second[::-1]


def test_a_shared_block_is_held_until_the_last_lets_go() -> None:
    it, _ = pool(4)
    blocks = it.take(2)
    it.share(blocks)
    it.release(blocks)
    assert it.active == 2
    assert it.state_map().count(2) == 2
    it.release(blocks)
    assert it.active == 0
    with pytest.raises(ValueError, match="does not hold it"):
        it.release(blocks)


def test_sharing_a_free_block_or_naming_it_is_a_bug() -> None:
    it, _ = pool(4)
    with pytest.raises(ValueError, match="nothing to share"):
        it.share([0])
    with pytest.raises(ValueError, match="not active"):
        it.name(0)


def test_capacity_bounds_what_is_active_and_not_what_is_cached() -> None:
    it, _ = pool(8)
    named(it, 6)
    it.set_capacity(3)
    assert it.available == 3
    it.take(3)
    assert it.available == 0
    it.set_capacity(2)
    assert it.available == -1
    assert it.active + it.cached + it.free == 8
    with pytest.raises(ValueError, match="outside"):
        it.set_capacity(9)


def test_forget_frees_the_cached_and_lets_the_active_become_free_later() -> None:
    it, evicted = pool(8)
    cached = named(it, 3)
    held = it.take(2)
    it.name(held[0])
    assert it.forget() == 3
    assert sorted(evicted) == sorted([*cached, held[0]])
    it.release(held)
    assert (it.cached, it.free) == (0, 8)
    it.invariants()


def test_memory_is_given_back_with_hysteresis_and_only_that_of_free_blocks() -> None:
    it, _ = pool(256)
    few = it.take(32)
    it.release(few)
    assert it.take_discards() == ()
    many = it.take(128)
    it.release(many)
    assert it.discards_due
    given = it.take_discards()
    assert len(given) == 128 - 16
    assert list(given) == sorted(given)
    assert it.take_discards() == ()
    assert not it.discards_due
    held = it.take(200)
    it.release(held[:100])
    assert not set(it.take_discards()) & set(held[100:])
    it.invariants()


def test_any_sequence_of_uses_keeps_every_block_in_exactly_one_state() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        it, evicted = pool(rng.choice([1, 7, 40]))
        tables: list[list[int]] = []
        for _ in range(200):
            if tables and rng.random() < 0.45:
                table = tables.pop(rng.randrange(len(tables)))
                for block in table[:2]:
                    it.name(block)
                it.release(table)
            elif tables and rng.random() < 0.3:
                table = rng.choice(tables)
                it.share(table)
                tables.append(list(table))
            elif it.available:
                tables.append(it.take(rng.randint(1, it.available), expected=rng.randint(1, 9)))
            it.invariants()
            assert it.active == len({block for table in tables for block in table})
        assert len(evicted) <= 200 * 40
