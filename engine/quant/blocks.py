"""Blocks: a weight in one of ggml's block formats, and the plain numbers that it stands for.

Owns the formats that a prepared model keeps (github.com/ggml-org/ggml, ggml-common.h): 32 integers of a row share an
fp16 scale, and for Q4_1 an fp16 offset. It must not know products. Enter at `Blocks`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.packing import BLOCK, ROW_BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Blocks:
    """`data`: uint8 [rows, columns / 32 * bytes of a block]."""

    data: Tensor
    kind: str  # Q8_0 | Q4_0 | Q4_1

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, columns] of the numbers."""
        return self.data.shape[0], self.data.shape[1] // ROW_BLOCK_BYTES[self.kind] * BLOCK

    def plain(self) -> Tensor:
        """The numbers, fp32 [rows, columns]: the same bits as the gguf package's."""
        rows, columns = self.shape
        blocks = self.data.reshape(-1, ROW_BLOCK_BYTES[self.kind])
        scale = blocks[:, :2].contiguous().view(torch.float16).float()
        if self.kind == "Q8_0":
            return (blocks[:, 2:].contiguous().view(torch.int8).float() * scale).view(rows, columns)
        nibbles = blocks[:, -BLOCK // 2 :]
        items = torch.cat((nibbles & 15, nibbles >> 4), 1).float()
        if self.kind == "Q4_0":
            return ((items - 8) * scale).view(rows, columns)
        return (items * scale + blocks[:, 2:4].contiguous().view(torch.float16).float()).view(rows, columns)
