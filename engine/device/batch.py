"""From a plan's slices to a step's tensors. A pure function of the slices and the rows."""

from functools import partial

import torch
from torch import Tensor

from engine.device.rows import Rows
from engine.kernels.ops import Span, Spans
from engine.layers.batch import Batch
from engine.plan import SeqSlice


def build(slices: tuple[SeqSlice, ...], rows: Rows, rope: tuple[Tensor, Tensor]) -> Batch:
    """`rope`: cos and sin by position. The batch's spans are in the order of `slices`."""
    device = rows.tokens.device
    size = rows.block_size
    numbers: list[int] = []
    places: list[int] = []
    spans: list[Span] = []
    for piece in slices:
        begin = len(places)
        if piece.count == 1:
            numbers.append(piece.row)
            places.append(piece.start)
        else:
            numbers.extend([piece.row] * piece.count)
            places.extend(range(piece.start, piece.start + piece.count))
        row = rows[piece.row]
        first_slot = row.blocks[0] * size if row.one_run else None
        slots = None if row.one_run else partial(_slots, rows, piece)
        spans.append(Span(begin, piece.count, piece.start, first_slot, slots, piece.row))
    row_index = torch.tensor(numbers, device=device)
    position = torch.tensor(places, device=device)
    tokens = rows.tokens[row_index, position]
    slots = rows.table[row_index, position // size] * size + position % size
    cos, sin = rope
    return Batch(tokens, slots, cos[position], sin[position], Spans(spans, rows.table, size))


def _slots(rows: Rows, piece: SeqSlice) -> Tensor:
    """The cache slot of every position of a context whose blocks are scattered."""
    length = piece.start + piece.count
    blocks = rows.table[piece.row, : -(-length // rows.block_size)]
    offsets = torch.arange(rows.block_size, device=blocks.device)
    return (blocks[:, None] * rows.block_size + offsets).view(-1)[:length]
