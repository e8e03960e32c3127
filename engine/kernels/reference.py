"""The plain table: torch's own operators, on any device. The oracle of every other table."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.ops import Linear, Span, Spans, causal_mask
from engine.load.safetensors_file import ITEM_BYTES
from engine.quant.blocks import Blocks


class Reference:
    """See engine.kernels.ops.Ops for shapes."""

    name = "reference"
    reason = "plain torch operators"
    repacks = False
    keeps: frozenset[str] = frozenset()

    def resident_bytes(self, kind: str, rows: int, columns: int) -> int:
        return rows * columns * ITEM_BYTES[kind]

    def linear(self, weight: Tensor | Blocks, bias: Tensor | None = None) -> Linear:
        assert isinstance(weight, Tensor), "this table keeps no blocks"
        return lambda x: F.linear(x, weight, bias)

    def table(self, weight: Tensor | Blocks, product: bool) -> tuple[Linear, Linear | None]:
        assert isinstance(weight, Tensor), "this table keeps no blocks"
        return lambda tokens: weight[tokens], self.linear(weight) if product else None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return wide.to(x.dtype) * weight

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * cos + turned * sin

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def store(self, cache: Tensor, slots: Tensor, values: Tensor) -> None:
        cache.index_copy_(1, slots, values.transpose(0, 1))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float, window: int | None) -> Tensor:
        heads, size = q.shape[1:]
        group = heads // keys.shape[0]
        out = torch.empty_like(q)
        for span in spans:
            k, v = context(keys, span), context(values, span)
            rows = q[span.begin : span.begin + span.count].transpose(0, 1).float()
            scores = rows @ k.repeat_interleave(group, 0).transpose(1, 2).float() * scale
            mask = causal_mask(span, window, q.device)
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            seen = scores.softmax(-1) @ v.repeat_interleave(group, 0).float()
            out[span.begin : span.begin + span.count] = seen.transpose(0, 1).to(q.dtype)
        return out.view(-1, heads * size)


def context(cache: Tensor, span: Span) -> Tensor:
    """A span's context [K, length, D]: a view where it lies in one run, else a gathered copy."""
    if span.first_slot is not None:
        return cache[:, span.first_slot : span.first_slot + span.length]
    if not isinstance(span.slots, Tensor):
        assert span.slots is not None
        span.slots = span.slots()
    return cache.index_select(1, span.slots)
