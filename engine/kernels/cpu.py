"""The CPU's table where nothing can be compiled, and for bf16: prepacked products, attention on views of the pool.

Why each: oneDNN's packed product is 1.3 to 3 times as fast as the library's own for the 1 to 64 rows of a decode step,
because the weight is not packed again at every call. Attention takes the query heads of one group as rows of one matrix
product, on a view of the cache where the context lies in one run: no copy of the context, and no repeated heads.
Owns the fast twins only; what it does not override is the reference.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.ops import Linear, Span, Spans, causal_mask
from engine.kernels.reference import Reference, context
from engine.kernels.threads import one_thread
from engine.quant.blocks import Blocks

_PACK_ROWS = 512  # the batch the packed layout is chosen for: a large one is as fast for 1 row, and faster for 16
_QUERY_BLOCK = 128  # queries at once in a prefill: bounds the scores' memory


class Cpu(Reference):
    """See engine.kernels.ops.Ops for shapes."""

    name = "cpu"

    def __init__(self, dtype: torch.dtype) -> None:
        wide = dtype == torch.float32
        self.repacks = wide and can_pack()
        plain = "this build of torch cannot prepack" if wide else "only float32 is prepacked"
        self.reason = "prepacked oneDNN products" if self.repacks else f"plain products: {plain}"

    def linear(self, weight: Tensor | Blocks, bias: Tensor | None = None) -> Linear:
        assert isinstance(weight, Tensor), "this table keeps no blocks"
        if not self.repacks or weight.is_meta:
            return super().linear(weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        product = torch.ops.mkldnn._linear_pointwise
        return lambda x: product(x, packed, bias, "none", [], "")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.rms_norm(x, (x.shape[-1],), weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        out = x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float, window: int | None) -> Tensor:
        heads, size = q.shape[1:]
        kv_heads = keys.shape[0]
        group = heads // kv_heads
        grouped = (q * scale).view(-1, kv_heads, group, size)
        out = torch.empty_like(grouped)
        single = [span for span in spans if span.count == 1]
        if single:
            with one_thread():
                for span in single:
                    _decode(grouped, context(keys, span), context(values, span), out, span, window)
        for span in spans:
            if span.count > 1:
                mask = causal_mask(span, window, q.device)
                _prefill(grouped, context(keys, span), context(values, span), out, span, mask)
        return out.view(-1, heads * size)


def _softmax(scores: Tensor) -> Tensor:
    if scores.dtype == torch.float32:
        return torch.softmax(scores, -1)
    return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)


def _decode(grouped: Tensor, k: Tensor, v: Tensor, out: Tensor, span: Span, window: int | None) -> None:
    """One query: the rows of one product are the heads of the group."""
    if window is not None and span.length > window:
        k, v = k[:, -window:], v[:, -window:]
    scores = torch.bmm(grouped[span.begin], k.transpose(1, 2))
    torch.bmm(_softmax(scores), v, out=out[span.begin])


def _prefill(grouped: Tensor, k: Tensor, v: Tensor, out: Tensor, span: Span, mask: Tensor | None) -> None:
    """Blocks of queries; the rows of one product are (query, head of the group). Keys after a block are not read."""
    kv_heads, group, size = grouped.shape[1:]
    for offset in range(0, span.count, _QUERY_BLOCK):
        count = min(_QUERY_BLOCK, span.count - offset)
        begin = span.begin + offset
        seen = span.start + offset + count
        rows = grouped[begin : begin + count].permute(1, 0, 2, 3).reshape(kv_heads, count * group, size)
        scores = torch.bmm(rows, k[:, :seen].transpose(1, 2)).view(kv_heads, count, group, seen)
        if mask is not None:
            scores.masked_fill_(~mask[offset : offset + count, None, :seen], float("-inf"))
        weights = _softmax(scores).view(kv_heads, count * group, seen)
        got = torch.bmm(weights, v[:, :seen]).view(kv_heads, count, group, size)
        out[begin : begin + count] = got.permute(1, 0, 2, 3)


def can_pack() -> bool:
    """Whether this build of torch has oneDNN's packed linear and it works here: private operators, so it is tried."""
    try:
        weight = torch.eye(16)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 4)
        x = torch.ones(4, 16)
        return bool(torch.equal(torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""), x))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
