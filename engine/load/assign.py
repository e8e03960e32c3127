"""Weights: the tensors of a checkpoint as a family asks for them: checked, fused, in the serving dtype and device.

Owns naming (Hugging Face's) and fusing; it must not know which family asks. `dry=True` yields empty tensors of the
right shape: a family is built dry first, so that a checkpoint that does not match is refused before memory is taken.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.ops import Linear, Ops
from engine.layers.attention import Norm
from engine.layers.decoder import Decoder, Layer
from engine.load.checkpoint import Checkpoint
from engine.modelspec import ModelSpec
from engine.packing import BLOCK, ROW_BLOCK_BYTES
from engine.quant.blocks import Blocks

DTYPE_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(slots=True)
class Weights:
    """`bytes` counts what was handed out and will stay resident."""

    checkpoint: Checkpoint
    ops: Ops
    device: torch.device
    dtype: torch.dtype
    dry: bool = False
    bytes: int = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor, in the serving dtype. Raises CorruptModel if it is missing or of another shape."""
        self.bytes += torch.Size(shape).numel() * self.dtype.itemsize
        return self._plain([(name, shape)], owned=True)

    def linear(self, names: list[str], rows: list[int], columns: int, *, bias: bool = False) -> Linear:
        """The product with the weights NAME.weight [rows, columns] one below the other; with NAME.bias if `bias`."""
        parts = list(zip(names, rows, strict=True))
        weight = self._weight([(f"{n}.weight", (count, columns)) for n, count in parts])
        offset = None
        if bias:
            self.bytes += sum(rows) * self.dtype.itemsize
            offset = self._plain([(f"{n}.bias", (count,)) for n, count in parts], owned=True)
        return self.ops.linear(weight, offset)

    def norm(self, name: str, size: int, eps: float) -> Norm:
        """The root-mean-square norm with weight `name` [size]."""
        weight, rms_norm = self.tensor(name, size), self.ops.rms_norm
        return lambda x: rms_norm(x, weight, eps)

    def decoder(self, spec: ModelSpec, layers: list[Layer]) -> Decoder:
        """Embedding and head around `layers`; with tied embeddings the head multiplies by the embedding's table."""
        shape = (spec.vocab_size, spec.hidden_size)
        table = self._weight([("model.embed_tokens.weight", shape)])
        embedding, head = self.ops.table(table, product=spec.tie_embeddings)
        if head is None:
            head = self.linear(["lm_head"], [spec.vocab_size], spec.hidden_size)
        elif self.ops.repacks and not self.ops.keeps:  # the rows as they are, and the head repacked
            self.bytes += spec.vocab_size * spec.hidden_size * self.dtype.itemsize
        return Decoder(embedding, layers, self.norm("model.norm.weight", spec.hidden_size, spec.rms_norm_eps), head)

    def _weight(self, parts: list[tuple[str, tuple[int, ...]]]) -> Tensor | Blocks:
        """Weights one below the other: as the file has them if the table keeps that kind, else as plain numbers."""
        for name, shape in parts:
            self.checkpoint.check(name, shape)
        rows, columns = sum(shape[0] for _, shape in parts), parts[0][1][1]
        kinds = {self.checkpoint.kind(name) for name, _ in parts}
        kind = kinds.pop()
        if kinds or kind not in self.ops.keeps:
            self.bytes += self.ops.resident_bytes(DTYPE_KINDS[self.dtype], rows, columns)
            return self._plain(parts, owned=not self.ops.repacks)
        self.bytes += self.ops.resident_bytes(kind, rows, columns)
        if self.dry:
            row_bytes = columns // BLOCK * ROW_BLOCK_BYTES[kind] if kind in ROW_BLOCK_BYTES else 0
            if row_bytes:
                return Blocks(torch.empty((rows, row_bytes), dtype=torch.uint8, device="meta"), kind)
            return torch.empty((rows, columns), dtype=self.dtype, device="meta")
        weights = [self.checkpoint.weight(name) for name, _ in parts]
        data = torch.cat([weight.data if isinstance(weight, Blocks) else weight for weight in weights])
        return Blocks(data, kind) if isinstance(weights[0], Blocks) else data

    def _plain(self, parts: list[tuple[str, tuple[int, ...]]], owned: bool) -> Tensor:
        """`owned`: in memory of its own, not a view of the file. What is about to be repacked need not be; of what
        stays, nothing may keep the file mapped, or all of it would count as resident."""
        for name, shape in parts:
            self.checkpoint.check(name, shape)
        rows = sum(shape[0] for _, shape in parts)
        if self.dry:
            return torch.empty((rows, *parts[0][1][1:]), dtype=self.dtype, device="meta")
        tensors = [self.checkpoint.tensor(name) for name, _ in parts]
        if len(tensors) > 1:
            return torch.cat(tensors).to(self.device, self.dtype)
        return tensors[0].to(self.device, self.dtype, copy=owned)
