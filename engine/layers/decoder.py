"""Decoder: the frame that every pre-norm decoder-only family hangs its layers in. It owns the order of a layer's parts
and the residual stream; what the parts are is the family's business (engine/models)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.ops import Linear, Ops
from engine.kv.store import KVStore
from engine.layers.attention import Attention, Norm
from engine.layers.batch import Batch


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(silu(gate(x)) * up(x)); `gate_up` has both products in one. Source: GLU variants (arXiv:2002.05202)."""

    ops: Ops
    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.ops.silu_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class Layer:
    """One pre-norm layer."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Callable[[Tensor], Tensor]


class Decoder:
    """Token ids in, hidden states out; `logits` is apart, because only some positions need it."""

    def __init__(self, embedding: Linear, layers: list[Layer], norm: Norm, head: Linear) -> None:
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head

    def hidden(self, batch: Batch, store: KVStore, tick: Callable[[], None] = lambda: None) -> Tensor:
        """[T, hidden], before the last norm; writes the step's keys and values into `store`. `tick` is called before
        each layer."""
        x = self._embedding(batch.tokens)
        for layer, keys, values in zip(self._layers, store.keys, store.values, strict=True):
            tick()
            x += layer.attention(layer.attention_norm(x), batch, keys, values)
            x += layer.mlp(layer.mlp_norm(x))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] → [S, vocabulary] in fp32."""
        return self._head(self._norm(hidden)).to(torch.float32)
