"""BlockPool: who holds which KV block. Ids and counts only; the tensors are engine/kv/store.py's.

Each block is exactly one of: *active* (some table holds it, `ref` ≥ 1), *cached* (nobody holds it, but it was named as
holding a known prefix; evicted in LRU order) or *free*. `capacity` bounds the active ones and may change while serving;
cached and free blocks are reserve. It must not know tokens, hashes or sequences: what a block is named for is
engine/kv/prefix.py's, which is told through `evicted` when a name dies. Enter at `take`, `share`, `release`.

Free blocks are kept as maximal runs with boundary tags (Knuth, TAOCP vol. 1, 2.5), in one bucket per power of two of
their length, so every operation is O(1) a block. A table prefers to continue where its last block ends, because a
device reads a contiguous table without gathering it; a table that starts somewhere is therefore placed with room to
grow, both for itself and for the table that ends just before the run. In a pool full of cached blocks there would be no
such room: then some more are evicted than are needed at once, up to a sixteenth of the pool at a time.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from engine.kv.ages import BlockAges

_FREE, _CACHED, _ACTIVE, _SHARED = range(4)  # values of `state_map`


class BlockPool:
    """Ids 0 … num_blocks - 1. Not thread-safe. Misuse (taking more than `available`, releasing what nobody holds) is
    a bug of the caller and raises ValueError."""

    def __init__(self, num_blocks: int, evicted: Callable[[int], None], ages: BlockAges | None = None) -> None:
        self.num_blocks = num_blocks
        self._capacity = num_blocks
        self._evicted = evicted
        self._ages = ages or BlockAges(num_blocks)
        self._refs = [0] * num_blocks
        self._named = bytearray(num_blocks)
        self._lru: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently used first
        self._active = 0
        self._free = 0
        self._length: dict[int, int] = {}  # first block of a free run → its length
        self._first: dict[int, int] = {}  # last block of a free run → its first
        self._buckets: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length() + 1)]
        self._dirty: dict[int, None] = {}  # free blocks whose memory was written and not given back; oldest first
        self._keep_dirty = max(16, num_blocks // 16)
        self._longest_wish = max(1, num_blocks // 16)  # a run that is worth evicting for
        if num_blocks:
            self._put_run(0, num_blocks)
            self._free = num_blocks

    @property
    def active(self) -> int:
        return self._active

    @property
    def cached(self) -> int:
        return len(self._lru)

    @property
    def free(self) -> int:
        return self._free

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def available(self) -> int:
        """Blocks that may become active now. Negative while the capacity is below what is active."""
        return min(self._free + len(self._lru), self._capacity - self._active)

    def set_capacity(self, blocks: int) -> None:
        """How many may be active at once; takes effect for the next `take` or `share`."""
        if not 0 < blocks <= self.num_blocks:
            raise ValueError(f"capacity {blocks} is outside [1, {self.num_blocks}]")
        self._capacity = blocks

    def holders(self, block: int) -> int:
        """How many tables hold it; 0 while it is cached or free."""
        return self._refs[block]

    def take(self, count: int, after: int = -1, expected: int = 1) -> list[int]:
        """`count` blocks for one table, each with one reference: if possible those that follow block `after`, else
        from the longest free runs, else from the cache. `expected` is how many the table may come to need from here.
        """
        if count > self.available:
            raise ValueError(f"{count} blocks were asked for, {self.available} are available")
        blocks: list[int] = []
        if after >= 0 and after + 1 in self._length:
            blocks += self._carve(after + 1, 0, count)
        if len(blocks) < count:
            self._evict_for(count - len(blocks), min(max(count, expected), self._longest_wish))
        while len(blocks) < count:
            first = self._long_run()
            blocks += self._carve(first, self._placement(first, expected - len(blocks)), count - len(blocks))
        for block in blocks:
            self._refs[block] = 1
        self._active += count
        self._ages.taken(blocks)
        return blocks

    def take_next(self, after: int) -> int:
        """The block that follows `after`, with one reference, if it is free; else -1. What `take` would do for a table
        that grows by one, in a quarter of the time: in a full house one row in sixteen does in every step."""
        first = after + 1
        length = self._length.pop(first, 0)
        if not length:
            return -1
        if self._active >= self._capacity:
            self._length[first] = length
            raise ValueError("no block is available")
        del self._buckets[length.bit_length()][first]
        if length > 1:
            self._length[first + 1] = length - 1
            self._first[after + length] = first + 1
            self._buckets[(length - 1).bit_length()][first + 1] = None
        else:
            del self._first[first]
        self._free -= 1
        self._dirty.pop(first, None)
        self._refs[first] = 1
        self._active += 1
        self._ages.taken((first,))
        return first

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each block, which must be active or cached."""
        for block in blocks:
            if self._refs[block] == 0:
                if block not in self._lru:
                    raise ValueError(f"block {block} is free: nothing to share")
                del self._lru[block]
                self._active += 1
                self._ages.shared(block)
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each block. The last ones of a table are the first to be evicted: a prefix is worth
        nothing without its beginning."""
        for block in reversed(blocks):
            refs = self._refs[block] - 1
            if refs < 0:
                raise ValueError(f"block {block} is released by somebody who does not hold it")
            self._refs[block] = refs
            if refs:
                continue
            self._active -= 1
            if self._named[block]:
                self._lru[block] = None
                self._ages.cached(block)
            else:
                self._put_free(block)

    def name(self, block: int) -> None:
        """An active block now holds a known prefix: when nobody holds it any more it is cached, not free."""
        if not self._refs[block]:
            raise ValueError(f"block {block} is not active: it cannot be named")
        self._named[block] = 1

    def forget(self) -> int:
        """Every name dies and every cached block becomes free. Returns how many became free."""
        count = len(self._lru)
        for block in range(self.num_blocks):
            if self._named[block]:
                self._unname(block)
        for block in self._lru:
            self._put_free(block)
        self._lru.clear()
        return count

    @property
    def discards_due(self) -> bool:
        return len(self._dirty) > 2 * self._keep_dirty

    def take_discards(self) -> tuple[int, ...]:
        """Free blocks whose memory is better given back, in ascending order; usually none.

        With hysteresis, since a page given back is a fault when it is used again: nothing up to 2x what is worth
        keeping, then down to 1x, the longest unused first.
        """
        if not self.discards_due:
            return ()
        count = len(self._dirty) - self._keep_dirty
        oldest = [block for block, _ in zip(self._dirty, range(count), strict=False)]
        for block in oldest:
            del self._dirty[block]
        return tuple(sorted(oldest))

    def state_map(self) -> bytes:
        """One byte a block: 0 free, 1 cached, 2 active, 3 active and shared."""
        states = bytearray(min(refs, 2) + 1 if refs else _FREE for refs in self._refs)
        for block in self._lru:
            states[block] = _CACHED
        return bytes(states)

    def sizes(self) -> dict[str, int]:
        """Entries of every map in here that grows with use; none exceeds the number of blocks."""
        return {
            "pool_free_runs": len(self._length),
            "pool_cached": len(self._lru),
            "pool_dirty": len(self._dirty),
            **self._ages.sizes(),
        }

    def invariants(self) -> None:
        """Raises AssertionError unless every block is active, cached or free, exactly once. O(blocks): for tests."""
        owners: list[str] = ["active" if refs else "" for refs in self._refs]
        for block in self._lru:
            assert not owners[block], f"block {block} is cached and {owners[block]}"
            assert self._named[block], f"block {block} is cached without a name"
            owners[block] = "cached"
        for first, length in self._length.items():
            assert self._first.get(first + length - 1) == first, f"free run {first}+{length} has lost its end"
            assert first in self._buckets[length.bit_length()], f"free run {first}+{length} is in a wrong bucket"
            for block in range(first, first + length):
                assert not owners[block], f"block {block} is free and {owners[block]}"
                assert not self._named[block], f"block {block} is free and named"
                owners[block] = "free"
        lost = [block for block, owner in enumerate(owners) if not owner]
        assert not lost, f"blocks {lost} are neither active nor cached nor free"
        assert owners.count("active") == self._active, "the count of active blocks is wrong"
        assert owners.count("free") == self._free, "the count of free blocks is wrong"
        assert all(owners[block] == "free" for block in self._dirty), "a block in use is to be given back"
        assert len(self._first) == len(self._length) == sum(map(len, self._buckets)), "free runs are out of step"

    def _long_run(self) -> int:
        """The first block of a free run no shorter than half the longest."""
        for bucket in reversed(self._buckets):
            if bucket:
                return next(reversed(bucket))
        raise ValueError("no block is free")

    def _placement(self, first: int, expected: int) -> int:
        """How far into the run a table that may need `expected` blocks starts: with room for itself, and if a table
        ends just before the run, with up to half of the run left for that one to grow into."""
        if first == 0 or not self._refs[first - 1]:
            return 0
        length = self._length[first]
        return min(length // 2, max(0, length - expected))

    def _carve(self, first: int, offset: int, count: int) -> range:
        """Cut up to `count` blocks out of a free run, `offset` blocks after its beginning."""
        length = self._length[first]
        self._drop_run(first, length)
        count = min(count, length - offset)
        start = first + offset
        if offset:
            self._put_run(first, offset)
        rest = length - offset - count
        if rest:
            self._put_run(start + count, rest)
        self._free -= count
        taken = range(start, start + count)
        if self._dirty:
            for block in taken:
                self._dirty.pop(block, None)
        return taken

    def _put_free(self, block: int) -> None:
        """A block becomes free and joins the runs beside it."""
        first, length = block, 1
        after = self._length.get(block + 1)
        if after is not None:
            self._drop_run(block + 1, after)
            length += after
        before = self._first.get(block - 1)
        if before is not None:
            length += block - before
            first = before
            self._drop_run(before, block - before)
        self._put_run(first, length)
        self._free += 1
        self._dirty[block] = None
        self._ages.freed(block)

    def _put_run(self, first: int, length: int) -> None:
        self._length[first] = length
        self._first[first + length - 1] = first
        self._buckets[length.bit_length()][first] = None

    def _drop_run(self, first: int, length: int) -> None:
        del self._length[first]
        del self._first[first + length - 1]
        del self._buckets[length.bit_length()][first]

    def _evict_for(self, count: int, wish: int) -> None:
        """Let cached blocks become free, the least recently used first, until `count` are; and a while longer if that
        may bring about a run of `wish` blocks: a table that is evicted whole leaves the run that it lay in."""
        most = 2 * wish
        while self._lru and (self._free < count or (most and not self._has_run(wish))):
            block, _ = self._lru.popitem(last=False)
            self._unname(block)
            self._put_free(block)
            most = max(0, most - 1)

    def _has_run(self, length: int) -> bool:
        """Whether some free run surely has `length` blocks: its bucket is that of a power of two not below it."""
        return any(self._buckets[(length - 1).bit_length() + 1 :])

    def _unname(self, block: int) -> None:
        self._named[block] = 0
        self._evicted(block)
