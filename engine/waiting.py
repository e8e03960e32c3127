"""LazyHeap and WaitingQueue: who waits, in order, whatever their number.

Nothing here is O(waiting) in a step: removal marks, and marked entries are dropped when they surface or when they
outnumber the live ones. It must not know why somebody waits. Enter at `WaitingQueue.head`.
"""

from collections.abc import Container, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

from engine.policy import Rank, admission_key, size_class
from engine.sequence import Sequence

Item = TypeVar("Item", bound=Hashable)


class LazyHeap(Generic[Item]):
    """Items by key, smallest first. An item is in it at most once; keys are unique (they end in a serial number)."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, Item]] = []
        self._keys: dict[Item, Any] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, item: Item) -> bool:
        return item in self._keys

    def __iter__(self) -> Iterator[Item]:
        return iter(self._keys)

    @property
    def entries(self) -> int:
        """Entries held, dead ones included."""
        return len(self._heap)

    def push(self, key: Any, item: Item) -> None:
        self._keys[item] = key
        heappush(self._heap, (key, item))

    def first(self) -> tuple[Any, Item] | None:
        """The smallest key and its item."""
        heap, keys = self._heap, self._keys
        while heap:
            key, item = heap[0]
            if keys.get(item) == key:
                return key, item
            heappop(heap)
        return None

    def discard(self, item: Item) -> None:
        """Take it out, if it is in."""
        if self._keys.pop(item, None) is not None and len(self._heap) > 2 * len(self._keys):
            self._heap = [(key, other) for other, key in self._keys.items()]
            heapify(self._heap)


class WaitingQueue:
    """Sequences that wait for blocks and a row: one heap per size class, so that where the head of the line may not
    begin because of its size, smaller ones behind it are found at once."""

    def __init__(self) -> None:
        self._classes: dict[int, LazyHeap[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    @property
    def entries(self) -> int:
        return sum(heap.entries for heap in self._classes.values())

    def push(self, sequence: Sequence) -> None:
        tokens = len(sequence.tokens)
        heap = self._classes.setdefault(size_class(tokens), LazyHeap())
        heap.push(admission_key(sequence.rank, tokens), sequence)

    def discard(self, sequence: Sequence) -> None:
        heap = self._classes.get(size_class(len(sequence.tokens)))
        if heap is not None:
            heap.discard(sequence)

    def head(self, skipped: Container[int] = ()) -> tuple[int, Sequence] | None:
        """The next in line outside the `skipped` classes, and its class."""
        best: tuple[Rank, int, Sequence] | None = None
        for size, heap in self._classes.items():
            if size in skipped:
                continue
            first = heap.first()
            if first is not None and (best is None or first[0] < best[0]):
                best = (first[0], size, first[1])
        return best and best[1:]

    def count(self, size: int) -> int:
        """How many wait in one class."""
        return len(self._classes[size])
