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
        """One tensor. Raises CorruptModel if it is missing or of another shape."""
        return self._fused([(name, shape)], owned=True)

    def linear(self, names: list[str], rows: list[int], columns: int, *, bias: bool = False) -> Linear:
        """The product with the weights NAME.weight [rows, columns] one below the other; with NAME.bias if `bias`."""
        parts = list(zip(names, rows, strict=True))
        weight = self._fused([(f"{n}.weight", (count, columns)) for n, count in parts], owned=not self.ops.repacks)
        offset = self._fused([(f"{n}.bias", (count,)) for n, count in parts], owned=True) if bias else None
        return self.ops.linear(weight, offset)

    def norm(self, name: str, size: int, eps: float) -> Norm:
        """The root-mean-square norm with weight `name` [size]."""
        weight, rms_norm = self.tensor(name, size), self.ops.rms_norm
        return lambda x: rms_norm(x, weight, eps)

    def decoder(self, spec: ModelSpec, layers: list[Layer]) -> Decoder:
        """Embedding and head around `layers`; with tied embeddings the head multiplies by the embedding's table."""
        table = self.tensor("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        if spec.tie_embeddings:
            head = self.ops.linear(table)
            self.bytes += table.numel() * table.element_size() if self.ops.repacks else 0
        else:
            head = self.linear(["lm_head"], [spec.vocab_size], spec.hidden_size)
        return Decoder(table, layers, self.norm("model.norm.weight", spec.hidden_size, spec.rms_norm_eps), head)

    def _fused(self, parts: list[tuple[str, tuple[int, ...]]], owned: bool) -> Tensor:
        """`owned`: in memory of its own, not a view of the file. What is about to be repacked need not be; of what
        stays, nothing may keep the file mapped, or all of it would count as resident."""
        for name, shape in parts:
            self.checkpoint.check(name, shape)
        rows = sum(shape[0] for _, shape in parts)
        shape = (rows, *parts[0][1][1:])
        self.bytes += torch.Size(shape).numel() * self.dtype.itemsize
        if self.dry:
            return torch.empty(shape, dtype=self.dtype, device="meta")
        tensors = [self.checkpoint.tensor(name) for name, _ in parts]
        if len(tensors) > 1:
            return torch.cat(tensors).to(self.device, self.dtype)
        return tensors[0].to(self.device, self.dtype, copy=owned)
