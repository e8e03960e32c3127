"""Ops: the table of operations that a model is written in, and the geometry they share.

Owns the signatures. Each table is a class with these methods: `reference.Reference` is the oracle, plain torch on any
device; `cpu.Cpu` is its fast twin. It must not know models, rows or scheduling. Enter at `Ops`.

Shapes: T granted positions of one step, flat over sequences; H query heads, K key/value heads, D head size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from engine.quant.blocks import Blocks

Linear = Callable[[Tensor], Tensor]  # [T, in] → [T, out]


@dataclass(slots=True)
class Span:
    """One sequence's part of a step: queries [begin, begin + count) of the flat batch, which stand at positions
    [start, start + count) of a context of `length = start + count` positions in the cache.

    `first_slot` is the cache slot of position 0 if the context lies in one run of the pool, else None and `slots`
    [length] has the slot of every position, or makes it once it is asked for. `row` is the sequence's row of the block
    table. `masks` keeps the attention masks of this step by window.
    """

    begin: int
    count: int
    start: int
    first_slot: int | None
    slots: Tensor | Callable[[], Tensor] | None
    row: int = 0
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.start + self.count


class Spans(list[Span]):
    """The spans of a step, and where their blocks are: `table` [rows, blocks] int64, for tables that read the cache in
    place."""

    def __init__(self, spans: Iterable[Span], table: Tensor, block_size: int) -> None:
        super().__init__(spans)
        self.table = table
        self.block_size = block_size

    @cached_property
    def numbers(self) -> Tensor:
        """begin, count, start, row of each span: [spans, 4] int64."""
        return torch.tensor([(span.begin, span.count, span.start, span.row) for span in self])


class Ops(Protocol):
    """Everything a decoder needs. Tensors are on one device; nothing here allocates what outlives the call, except
    `linear`, which may repack the weight."""

    name: str
    reason: str  # why this table, for Resolved
    repacks: bool  # whether `linear` keeps a copy of its own, so that `weight` may be a view of the file
    keeps: frozenset[str]  # kinds of weights (engine.packing.KINDS) it takes as they are; others come in its dtype

    def resident_bytes(self, kind: str, rows: int, columns: int) -> int:
        """What a weight of this kind takes once `linear` or `table` has it."""
        ...

    def linear(self, weight: Tensor | Blocks, bias: Tensor | None = None) -> Linear:
        """x → x @ weight.T + bias; weight [out, in]. May keep a repacked copy and drop `weight`."""
        ...

    def table(self, weight: Tensor | Blocks, product: bool) -> tuple[Linear, Linear | None]:
        """Embedding: tokens [T] int64 → rows of weight [vocabulary, hidden]; and with `product` the tied head too."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension (arXiv:1910.07467), in fp32 inside."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding (arXiv:2104.09864), halves convention: x [T, heads, D]; cos, sin [T, 1, D]. May
        overwrite x."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2I] → silu(first half) * second half, [T, I]."""
        ...

    def store(self, cache: Tensor, slots: Tensor, values: Tensor) -> None:
        """Write values [T, K, D] into cache [K, all slots, D] at slots [T]."""
        ...

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float, window: int | None) -> Tensor:
        """Causal attention of q [T, H, D] over each span's own context in keys/values [K, all slots, D] → [T, H*D].

        With a window w, a query at position p sees positions (p - w, p].
        """
        ...


def causal_mask(span: Span, window: int | None, device: torch.device) -> Tensor | None:
    """[count, length] bool, true where a query may look; None where it may look everywhere. Kept in the span."""
    if window not in span.masks:
        limited = window is not None and span.length > window
        if span.count == 1 and not limited:
            span.masks[window] = None
        else:
            query = torch.arange(span.start, span.length, device=device)[:, None]
            key = torch.arange(span.length, device=device)[None, :]
            mask = key <= query
            if limited and window is not None:
                mask &= key > query - window
            span.masks[window] = mask
    return span.masks[window]
