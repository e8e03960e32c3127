"""Rows: what the device remembers of each running sequence between steps, so that a plan can be a diff.

Owns tokens, block tables and sampling parameters by row, in tensors of fixed size (rows x longest context).
A sampled token is written here on the device, so that the next step can start from it without a way back to the host.
It must not know requests' lives, policies or the model. Enter at `Rows.apply`.
"""

from dataclasses import dataclass

import torch

from engine.budget import Resolved
from engine.kv.layout import blocks_for
from engine.kv.store import KVStore
from engine.plan import RowInit, SeqSlice, StepPlan
from engine.request import SamplingParams


@dataclass(slots=True)
class Row:
    """The host's side of one row. `one_run`: its blocks are consecutive in the pool."""

    sampling: SamplingParams
    prompt_len: int
    blocks: list[int]
    one_run: bool


class Rows:
    """`tokens` [rows, longest context + 1], `table` [rows, most blocks], both int64 on the device."""

    def __init__(self, resolved: Resolved, store: KVStore) -> None:
        device = torch.device(resolved.device)
        self.block_size = resolved.block_size
        self.tokens = torch.zeros(resolved.rows, resolved.max_model_len + 1, dtype=torch.int64, device=device)
        most = blocks_for(resolved.max_model_len + 1, resolved.block_size)
        self.table = torch.zeros(resolved.rows, most, dtype=torch.int64, device=device)
        self._rows: dict[int, Row] = {}
        self._store = store

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.tokens, self.table))

    def __getitem__(self, row: int) -> Row:
        return self._rows[row]

    def apply(self, plan: StepPlan) -> None:
        """The plan's diff, in its order: released, admitted, discarded, copies, tables."""
        for row in plan.released:
            del self._rows[row]
        for init in plan.admitted:
            self._begin(init)
        if plan.discarded:
            self._store.discard(plan.discarded)
        for source, target in plan.copies:
            self._store.copy(source, target)
        for piece in plan.slices:
            self._extend(piece)

    def _begin(self, init: RowInit) -> None:
        self.tokens[init.row, : len(init.tokens)] = torch.tensor(init.tokens, dtype=torch.int64)
        row = self._rows[init.row] = Row(init.sampling, init.prompt_len, [], True)
        self._append(init.row, row, init.blocks)

    def _extend(self, piece: SeqSlice) -> None:
        row = self._rows[piece.row]
        for index, block in piece.replaced_blocks:
            row.blocks[index] = block
            self.table[piece.row, index] = block
        if piece.replaced_blocks:
            row.one_run = row.blocks == list(range(row.blocks[0], row.blocks[0] + len(row.blocks)))
        self._append(piece.row, row, piece.new_blocks)

    def _append(self, number: int, row: Row, blocks: tuple[int, ...]) -> None:
        if not blocks:
            return
        held = len(row.blocks)
        if len(blocks) == 1:
            self.table[number, held] = blocks[0]
        else:
            self.table[number, held : held + len(blocks)] = torch.tensor(blocks, dtype=torch.int64)
        for block in blocks:
            if row.blocks and block != row.blocks[-1] + 1:
                row.one_run = False
            row.blocks.append(block)
