"""KvSpace: a sequence's blocks, from admission to release: what can be shared, what must be taken, what is copied.

The meeting point of the pool (who holds a block) and the prefix cache (what a block holds). It must not know limits of
rows or tokens, nor the order of anything. Enter at `found` and `open`.

A sequence gets the blocks for all of its known tokens at once, when it is admitted, and then one block at a time; so
computing what is known can never run out of blocks, and the blocks of a prompt lie side by side. Only positions that
nobody else can see are ever written: the one partly shared block that a newcomer may need, it gets as a copy.
"""

from dataclasses import dataclass

from engine.kv.layout import blocks_for
from engine.kv.outlook import most_active
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
        self._lent: dict[Sequence, int] = {}  # of each that is open: how many of its blocks others hold as well
        self._refused: Sequence | None = None  # by the line, and nobody has ended since

    def set_limits(self, capacity: int, line: int, charge: int) -> None:
        """At most `capacity` blocks are active; sequences are opened while `line` blocks (0 = no line) are enough for
        what all of them are going to hold, each charged `charge` tokens of answer, and as many again when it has
        those."""
        self.pool.set_capacity(capacity)
        self._line, self._charge, self._refused = line, charge, None

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
        lent = sum(1 for block in shared if pool.holders(block))
        revived = whole - lent
        if fresh + revived + headroom > pool.available:
            return False
        if not self._below_line(sequence, fresh + revived, whole + fresh - lent):
            return False
        self._alone(shared, 1)
        pool.share(shared)
        taken = pool.take(fresh, shared[-1] if shared else -1, self._expected(sequence) - whole)
        if found.tokens % size and taken[0] != found.blocks[whole]:
            # The source needs no reference: even if it was evicted just now, copies precede everything that a step
            # writes. And if it was evicted to become the target, the content is there already.
            self._copies.append((found.blocks[whole], taken[0]))
        sequence.blocks = [*shared, *taken]
        self._lent[sequence] = lent
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
        return block

    def close(self, sequence: Sequence) -> None:
        """Take all blocks back."""
        self.pool.release(sequence.blocks)
        self._lent.pop(sequence, None)
        self._alone(sequence.blocks, -1)
        self._refused = None
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

    def _below_line(self, sequence: Sequence, blocks: int, own: int) -> bool:
        """Whether it may hold so many more `blocks`, of which it alone holds `own`. One alone may always; and whom the
        line has refused it refuses until one ends: until then all grow as was foreseen."""
        if not self._line or not self._lent:
            return True
        if self._refused is sequence:
            return False
        holders = [(self._to_come(one), len(one.blocks) - lent) for one, lent in self._lent.items()]
        holders.append((self._to_come(sequence), own))
        below = most_active(self.pool.active + blocks, holders, self.block_size) <= self._line
        self._refused = None if below else sequence
        return below

    def _alone(self, blocks: list[int], lends: int) -> None:
        """Who alone holds one of these first blocks of a table `lends` it from now on (1), or no longer (-1)."""
        owner = None
        for at, block in enumerate(blocks):
            if self.pool.holders(block) == 1:
                if owner is None or owner.blocks[at : at + 1] != [block]:
                    # Not always the same one: two that computed the same side by side have each named a part of it.
                    owner = next((one for one in self._lent if one.blocks[at : at + 1] == [block]), None)
                if owner is not None:
                    self._lent[owner] += lends

    def _to_come(self, sequence: Sequence) -> int:
        """Tokens that are charged for, and not there yet; those of a prompt have their blocks from the begin."""
        there, charge = len(sequence.tokens), self._charge
        done = there - len(sequence.request.prompt)
        return min(charge - done % charge if charge else 0, sequence.max_len - there)

    def _expected(self, sequence: Sequence) -> int:
        return blocks_for(sequence.max_len, self.block_size)
