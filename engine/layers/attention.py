"""Attention over the paged cache: project, rotate, store, attend, project back. It knows no family: what differs
between families (biases, norms of q and k, windows) is handed in."""

from collections.abc import Callable

from torch import Tensor

from engine.kernels.ops import Linear, Ops
from engine.layers.batch import Batch
from engine.modelspec import ModelSpec

Norm = Callable[[Tensor], Tensor]


class Attention:
    """`qkv`: [T, hidden] → [T, (H + 2K) * D], queries first; `norms`: of q and k, per head, before rotation."""

    def __init__(
        self,
        ops: Ops,
        spec: ModelSpec,
        qkv: Linear,
        out: Linear,
        window: int | None = None,
        norms: tuple[Norm, Norm] | None = None,
    ) -> None:
        self._ops = ops
        self._qkv = qkv
        self._out = out
        self._window = window
        self._norms = norms
        self._heads = spec.num_heads
        self._kv_heads = spec.num_kv_heads
        self._size = spec.head_dim
        self._scale = spec.head_dim**-0.5

    def __call__(self, x: Tensor, batch: Batch, keys: Tensor, values: Tensor) -> Tensor:
        """x [T, hidden] → [T, hidden]; keys, values: this layer's cache [K, slots, D], written at `batch.slots`."""
        rotated, kv = self._heads + self._kv_heads, self._kv_heads
        heads = self._qkv(x).view(x.shape[0], rotated + kv, self._size)
        qk, v = heads[:, :rotated], heads[:, rotated:]
        if self._norms is None:
            qk = self._ops.rotate(qk, batch.cos, batch.sin)
            q, k = qk[:, : self._heads], qk[:, self._heads :]
        else:
            q = self._ops.rotate(self._norms[0](qk[:, : self._heads]), batch.cos, batch.sin)
            k = self._ops.rotate(self._norms[1](qk[:, self._heads :]), batch.cos, batch.sin)
        self._ops.store(keys, batch.slots, k)
        self._ops.store(values, batch.slots, v)
        return self._out(self._ops.attend(q, keys, values, batch.spans, self._scale, self._window))
