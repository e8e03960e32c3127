"""What can be switched off to see what it is worth: the plain twins of the scheduler's collaborators, and their table.

Owns who may take a row (`Gate`), how a step's tokens go to prompts (`Prompts`), and which KvSpace there is. The
scheduler is handed one of each and never asks which. It must not know settings' sources, devices or measuring. Enter at
`parts`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine import policy
from engine.kv.layout import blocks_for
from engine.kv.pool import BlockPool
from engine.kv.prefix import Prefixes
from engine.kv.space import Found, KvSpace
from engine.sequence import Sequence as Choice


class Gate(Protocol):
    """How many rows may be taken now."""

    def rows(self, running: int, waiting: int, most: int) -> int:
        """In all, those that run included. Asked once a step."""


class Prompts(Protocol):
    """How what a step has left goes to rows that need more than one token; see the functions of engine/policy.py."""

    def budget(self, tokens: int, decoding: int, chunk: int, context: int, doubling: int) -> int: ...

    def may_open(self, pending: int, open_pending: Sequence[int], slots: int) -> bool: ...


class Continuous:
    """A row that becomes free is taken at once."""

    def rows(self, running: int, waiting: int, most: int) -> int:
        return most


class StaticBatches:
    """Whoever waits when nobody runs is the next batch, and nobody joins it before its last has ended."""

    def __init__(self) -> None:
        self._size = 0
        self._before = 0

    def rows(self, running: int, waiting: int, most: int) -> int:
        if not running:
            self._size = min(waiting, most)
        elif running < self._before:  # one has ended: what had no room so far goes into the next batch
            self._size = 0
        self._before = running
        return self._size


class Chunked:
    """Prompts are computed in pieces, so that others decode in between."""

    budget = staticmethod(policy.prefill_budget)
    may_open = staticmethod(policy.may_open)


class Whole:
    """A prompt is computed in one step, however long those that decode then wait. Only one that no step can hold, as
    after running out of memory, is computed in pieces."""

    def __init__(self) -> None:
        self._most = 0  # that a step without decoding rows has; 0 = this one has some

    def budget(self, tokens: int, decoding: int, chunk: int, context: int, doubling: int) -> int:
        self._most = 0 if decoding else tokens
        return tokens

    def may_open(self, pending: int, open_pending: Sequence[int], slots: int) -> bool:
        return 0 < self._most < pending and not open_pending


class ReservingSpace(KvSpace):
    """Every sequence gets blocks for the longest context when it is admitted, as in servers without paging."""

    def __init__(self, pool: BlockPool, prefixes: Prefixes, block_size: int, longest: int) -> None:
        super().__init__(pool, prefixes, block_size, longest)
        self._whole = blocks_for(longest, block_size)

    def fits_ever(self, sequence: Choice) -> bool:
        return self._whole <= self.pool.capacity

    def wanted(self, sequence: Choice) -> int:
        return self._whole

    def _to_come(self, sequence: Choice) -> int:
        return 0  # it has blocks for all of it

    def open(self, sequence: Choice, found: Found, headroom: int) -> bool:
        return super().open(sequence, found, 0)  # nobody grows


@dataclass(frozen=True, slots=True)
class Parts:
    """The scheduler's collaborators."""

    gate: Gate = field(default_factory=Continuous)
    prompts: Prompts = field(default_factory=Chunked)
    space: Callable[[BlockPool, Prefixes, int, int], KvSpace] = KvSpace


def parts(without: Collection[str] = ()) -> Parts:
    """For an engine without these features (names of engine.config.FEATURES; those of the device are not ours)."""
    return Parts(
        StaticBatches() if "continuous_batching" in without else Continuous(),
        Whole() if "chunked_prefill" in without else Chunked(),
        ReservingSpace if "paged_kv" in without else KvSpace,
    )
