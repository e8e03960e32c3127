"""KvSpace: a sequence's blocks, from admission to release: what can be shared, what must be taken, what is copied.

The meeting point of the pool (who holds a block) and the prefix cache (what a block holds). It must not know limits of
rows or tokens, nor the order of anything. Enter at `found` and `open`.

A sequence gets the blocks for all of its known tokens at once, when it is admitted, and then one block at a time; so
computing what is known can never run out of blocks, and the blocks of a prompt lie side by side. Only positions that
nobody else can see are ever written: the one partly shared block that a newcomer may need, it gets as a copy.
"""

from dataclasses import dataclass

from engine.kv.layout import blocks_for
from engine.kv.pool import BlockPool
from engine.kv.prefix import Prefixes
from engine.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Found:
    """The longest known prefix of a sequence: its first `tokens` lie in `blocks`, the last perhaps partly used."""

    tokens: int
    blocks: list[int]
    too_short: int  # tokens beyond it that agree with a known block, but not with all of it


class KvSpace:
    """Block accounting for sequences. `copies` collects (source, target) pairs until a plan takes them. `longest` is
    the longest context there can be; a table that grows as it must does not care."""

    def __init__(self, pool: BlockPool, prefixes: Prefixes, block_size: int, longest: int = 0) -> None:
        self.pool = pool
        self.prefixes = prefixes
        self.block_size = block_size
        self._copies: list[tuple[int, int]] = []
        self._line = self._charge = 0
        self._ends: dict[Sequence, int] = {}  # how many blocks each that is open is going to hold
        self._due = 0  # of these, how many they do not hold yet

    def set_limits(self, capacity: int, line: int, charge: int) -> None:
        """At most `capacity` blocks are active; sequences are opened while `line` blocks (0 = no line) are enough for
        what all of them are going to hold, each charged `charge` tokens of answer."""
        self.pool.set_capacity(capacity)
        self._line, self._charge = line, charge
        self._ends = {one: self._end(one) for one in self._ends}
        self._due = sum(max(0, end - len(one.blocks)) for one, end in self._ends.items())

    @property
    def planned(self) -> int:
        """Blocks that are going to be active if nobody else is opened."""
        return self.pool.active + self._due

    def fits_ever(self, sequence: Sequence) -> bool:
        """Whether its known tokens fit at all into what may be active."""
        return blocks_for(len(sequence.tokens), self.block_size) <= self.pool.capacity

    def found(self, sequence: Sequence) -> Found:
        """What of its tokens is in the store already. The last token is always left to compute: it yields the next."""
        tokens, salt = sequence.tokens, sequence.request.cache_salt
        most = len(tokens) - 1
        leader = sequence.leader
        if sequence.request.sampling.prompt_logprobs is not None:
            return Found(0, [], 0)  # every position has to be computed to have its log-probability
        if leader is not None and leader.state is State.RUNNING and leader.computed >= most:
            return Found(most, leader.blocks[: blocks_for(most, self.block_size)], 0)
        self.prefixes.extend(sequence.digests, tokens, salt, len(tokens) // self.block_size)
        blocks = self.prefixes.match(sequence.digests)
        matched = len(blocks) * self.block_size
        if matched > most:
            return Found(most, blocks, 0)
        too_short = self.prefixes.too_short(sequence.digests, len(blocks), tokens, salt)
        return Found(matched, blocks, min(too_short, most - matched))

    def wanted(self, sequence: Sequence) -> int:
        """How many blocks it has when it is admitted: those of all its tokens."""
        return blocks_for(len(sequence.tokens), self.block_size)

    def open(self, sequence: Sequence, found: Found, headroom: int) -> bool:
        """Give it the blocks that are `wanted`, if `headroom` blocks remain after that and the line allows it."""
        size, pool = self.block_size, self.pool
        whole = found.tokens // size
        shared = found.blocks[:whole]
        fresh = self.wanted(sequence) - whole
        revived = sum(1 for block in shared if not pool.is_active(block))
        if fresh + revived + headroom > pool.available:
            return False
        end = self._end(sequence)
        if self._line and self._ends and self.planned + revived + max(fresh, end - whole) > self._line:
            return False
        pool.share(shared)
        taken = pool.take(fresh, shared[-1] if shared else -1, self._expected(sequence) - whole)
        if found.tokens % size and taken[0] != found.blocks[whole]:
            # The source needs no reference: even if it was evicted just now, copies precede everything that a step
            # writes. And if it was evicted to become the target, the content is there already.
            self._copies.append((found.blocks[whole], taken[0]))
        sequence.blocks = [*shared, *taken]
        self._ends[sequence] = end
        self._due += max(0, end - len(sequence.blocks))
        sequence.named_blocks = whole
        sequence.computed = found.tokens
        return True

    def grow(self, sequence: Sequence) -> int:
        """Append one block to a full table. The caller has seen to it that one is available."""
        blocks = sequence.blocks
        block = self.pool.take_next(blocks[-1])
        if block < 0:
            (block,) = self.pool.take(1, blocks[-1], self._expected(sequence) - len(blocks))
        blocks.append(block)
        self._due -= len(blocks) <= self._ends[sequence]
        return block

    def close(self, sequence: Sequence) -> None:
        """Take all blocks back."""
        self.pool.release(sequence.blocks)
        self._due -= max(0, self._ends.pop(sequence, 0) - len(sequence.blocks))
        sequence.blocks = []
        sequence.named_blocks = 0
        sequence.computed = 0

    def name_full(self, sequence: Sequence) -> None:
        """Offer the blocks that became fully computed to the prefix cache."""
        full = sequence.computed // self.block_size
        tokens, salt = sequence.tokens, sequence.request.cache_salt
        self.prefixes.extend(sequence.digests, tokens, salt, full)
        for index in range(sequence.named_blocks, full):
            block = sequence.blocks[index]
            if self.prefixes.register(block, sequence.digests, index, tokens, salt):
                self.pool.name(block)
        sequence.named_blocks = full

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The copies to be made before the next step writes anything, in order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def _end(self, sequence: Sequence) -> int:
        """Blocks that it is going to hold, by what is charged for its answer."""
        length = min(sequence.max_len, len(sequence.request.prompt) + self._charge)
        return blocks_for(max(length, len(sequence.tokens)), self.block_size)

    def _expected(self, sequence: Sequence) -> int:
        return blocks_for(sequence.max_len, self.block_size)
