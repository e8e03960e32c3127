"""The CPU's compiled table: weights packed as the checkpoint has them, products, norms and attention in C++ (cpp/).

A step of one row is bound by reading the weights: kept in GGUF's blocks they are a fifth of fp32's bytes, and the
products still see exactly the numbers that dequantizing gives. Attention reads the paged cache where it lies. All of it
runs on one pool of threads that takes work in small pieces (cpp/pool.h). fp32 only; twins: engine/kernels/reference.py.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels.ops import Linear, Spans
from engine.kernels.reference import Reference
from engine.packing import KINDS, packed_bytes
from engine.quant.blocks import Blocks

_KIND_OF = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "pack": (_P, _I, _P, _I, _I, _I, _P),
    "product": (_P, _I, _P, _I, _I, _P, _I, _P, _P),
    "rows": (_I, _P, _I, _I, _P, _I, _P),
    "rms_norm": (_P, _I, _I, _P, _F, _P),
    "silu_mul": (_P, _I, _I, _P),
    "rotate": (_P, _I, _I, _I, _I, _P, _P),
    "store": (_P, _I, _I, _I, _I, _P, _P, _I),
    "attend": (_P, _P, _P, _I, _P, _I, _I, _I, _I, _I, _F, _I, _P, _I, _P, _I, _P),
}
_MOST_HEAD_SIZE = 256
_MOST_GROUP = 96


class Native(Reference):
    """See engine.kernels.ops.Ops for shapes. `threads`: of the pool, the caller's included."""

    name = "native"
    reason = "compiled kernels on weights as the file has them"
    repacks = True
    keeps = frozenset(KINDS)

    def __init__(self, library: Path, threads: int) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._call: dict[str, Callable[..., int | None]] = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._lib, f"inferd_{name}")
            function.argtypes, function.restype = arguments, ctypes.c_int if name == "attend" else None
            self._call[name] = function
        self._lib.inferd_pool.argtypes, self._lib.inferd_pool.restype = (_I,), _P
        self._lib.inferd_packed_bytes.argtypes, self._lib.inferd_packed_bytes.restype = (_I, _I, _I), _I
        self._pool = self._lib.inferd_pool(threads)

    def resident_bytes(self, kind: str, rows: int, columns: int) -> int:
        return packed_bytes(kind, rows, columns)

    def linear(self, weight: Tensor | Blocks, bias: Tensor | None = None) -> Linear:
        return self._product(*self._packed(weight), bias)

    def table(self, weight: Tensor | Blocks, product: bool) -> tuple[Linear, Linear | None]:
        data, number, outputs, inputs = packed = self._packed(weight)
        rows = self._call["rows"]

        def take(tokens: Tensor) -> Tensor:
            out = torch.empty(tokens.shape[0], inputs)
            rows(number, data.data_ptr(), outputs, inputs, tokens.data_ptr(), tokens.shape[0], out.data_ptr())
            return out

        return take, self._product(*packed, None) if product else None

    def _packed(self, weight: Tensor | Blocks) -> tuple[Tensor, int, int, int]:
        """Packed bytes, the kind's number, outputs, inputs."""
        source, kind = (weight.data, weight.kind) if isinstance(weight, Blocks) else (weight, _KIND_OF[weight.dtype])
        outputs, inputs = weight.shape
        number = KINDS.index(kind)
        if source.is_meta:
            return source, number, outputs, inputs
        source = source.contiguous()
        data = torch.zeros(packed_bytes(kind, outputs, inputs), dtype=torch.uint8)
        row_bytes = source.shape[1] * source.element_size()
        self._call["pack"](self._pool, number, source.data_ptr(), row_bytes, outputs, inputs, data.data_ptr())
        return data, number, outputs, inputs

    def _product(self, data: Tensor, number: int, outputs: int, inputs: int, bias: Tensor | None) -> Linear:
        product, pool, address = self._call["product"], self._pool, 0 if data.is_meta else data.data_ptr()

        def apply(x: Tensor, held: tuple[Tensor, Tensor | None] = (data, bias)) -> Tensor:
            """`held` keeps alive what the addresses point to."""
            x = x.contiguous()
            count = x.shape[0]
            out = torch.empty(count, outputs)
            offset = None if held[1] is None else held[1].data_ptr()
            product(pool, number, address, outputs, inputs, x.data_ptr(), count, offset, out.data_ptr())
            return out

        return apply

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, size = torch.empty_like(x), x.shape[-1]
        self._call["rms_norm"](x.data_ptr(), x.numel() // size, size, weight.data_ptr(), eps, out.data_ptr())
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        count, heads, size = x.shape
        self._call["rotate"](x.data_ptr(), count, x.stride(0), heads, size, cos.data_ptr(), sin.data_ptr())
        return x

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        count, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(count, size)
        self._call["silu_mul"](gate_up.data_ptr(), count, size, out.data_ptr())
        return out

    def store(self, cache: Tensor, slots: Tensor, values: Tensor) -> None:
        count, heads, size = values.shape
        self._call["store"](
            *(values.data_ptr(), count, values.stride(0), heads, size),
            *(slots.data_ptr(), cache.data_ptr(), cache.stride(0)),
        )

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float, window: int | None) -> Tensor:
        count, heads, size = q.shape
        kv_heads = keys.shape[0]
        if size % 16 or size > _MOST_HEAD_SIZE or heads // kv_heads > _MOST_GROUP:
            return super().attend(q, keys, values, spans, scale, window)
        out, table, numbers = torch.empty(count, heads * size), spans.table, spans.numbers
        failed = self._call["attend"](
            *(self._pool, keys.data_ptr(), values.data_ptr(), keys.stride(0)),
            *(table.data_ptr(), table.stride(0), spans.block_size),
            *(heads, kv_heads, size, scale, window or 0),
            *(numbers.data_ptr(), numbers.shape[0], q.data_ptr(), q.stride(0), out.data_ptr()),
        )
        if failed:
            raise MemoryError("attention: no memory for the list of its work")
        return out
