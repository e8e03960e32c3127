"""Every operator of the CPU's fast table against the plain one."""

import itertools

import pytest
import torch
from torch import Tensor

from engine.kernels.cpu import Cpu
from engine.kernels.ops import Span
from engine.kernels.reference import Reference
from engine.kernels.threads import one_thread

PLAIN = Reference()
CLOSE = {torch.float32: {"atol": 2e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 3e-2, "rtol": 2e-2}}
DTYPES = pytest.mark.parametrize("dtype", CLOSE, ids=str)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(ours: Tensor, plain: Tensor) -> None:
    assert ours.dtype == plain.dtype
    torch.testing.assert_close(ours, plain, **CLOSE[ours.dtype])


@DTYPES
@pytest.mark.parametrize(("rows", "biased"), list(itertools.product((1, 3, 16, 70), (False, True))))
def test_linear(dtype: torch.dtype, rows: int, biased: bool) -> None:
    weight, bias = random(96, 48, dtype=dtype) / 7, random(96, dtype=dtype, seed=1) if biased else None
    x = random(rows, 48, dtype=dtype, seed=2)
    same(Cpu(dtype).linear(weight, bias)(x), PLAIN.linear(weight, bias)(x))


@DTYPES
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = random(5, 64, dtype=dtype), random(64, dtype=dtype, seed=1)
    same(Cpu(dtype).rms_norm(x, weight, 1e-5), PLAIN.rms_norm(x, weight, 1e-5))
    heads = random(5, 6, 64, dtype=dtype)[:, :4]  # as q and k are normed: a view, per head
    same(Cpu(dtype).rms_norm(heads, weight, 1e-5), PLAIN.rms_norm(heads, weight, 1e-5))


@DTYPES
def test_rotate(dtype: torch.dtype) -> None:
    x, angles = random(5, 6, 32, dtype=dtype)[:, :4], random(5, 1, 16)
    cos, sin = (torch.cat((t, t), -1).to(dtype) for t in (angles.cos(), angles.sin()))
    before = x.clone()
    same(Cpu(dtype).rotate(x, cos, sin), PLAIN.rotate(x, cos, sin))
    assert torch.equal(x, before)


@DTYPES
def test_silu_mul(dtype: torch.dtype) -> None:
    x = random(5, 64, dtype=dtype)
    same(Cpu(dtype).silu_mul(x), PLAIN.silu_mul(x))


@DTYPES
def test_store(dtype: torch.dtype) -> None:
    slots, values = torch.tensor([9, 2, 30]), random(3, 2, 8, dtype=dtype)
    ours, plain = torch.zeros(2, 2, 40, 8, dtype=dtype)
    Cpu(dtype).store(ours, slots, values)
    PLAIN.store(plain, slots, values)
    assert torch.equal(ours, plain)
    assert torch.equal(ours[:, slots], values.transpose(0, 1))


@DTYPES
@pytest.mark.parametrize("window", [None, 7, 150])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_attend(dtype: torch.dtype, window: int | None, heads: int, kv_heads: int) -> None:
    """Decodes short and long, a first chunk, a later one across two blocks of queries, in runs and scattered."""
    shapes = [(1, 0), (1, 12), (1, 1100), (5, 0), (140, 33)]
    keys, values = random(kv_heads, 3000, 16, dtype=dtype), random(kv_heads, 3000, 16, dtype=dtype, seed=1)
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(2))
    for scattered in (False, True):
        ours, plain = [], []
        begin = 0
        for count, start in shapes:
            slots = order[: start + count] if scattered else None
            for spans in (ours, plain):
                spans.append(Span(begin, count, start, None if scattered else 3 * begin, slots))
            begin += count
        q = random(begin, heads, 16, dtype=dtype, seed=3)
        same(
            Cpu(dtype).attend(q, keys, values, ours, 0.25, window),
            PLAIN.attend(q, keys, values, plain, 0.25, window),
        )


def test_what_was_never_written_is_never_read() -> None:
    keys, values = torch.full((2, 2, 64, 8), float("nan"))
    keys[:, 8:20], values[:, 8:20] = random(2, 12, 8), random(2, 12, 8, seed=1)
    for ops in (Cpu(torch.float32), PLAIN):
        for span in (Span(0, 1, 11, 8, None), Span(0, 12, 0, 8, None)):
            got = ops.attend(random(span.count, 4, 8, seed=2), keys, values, [span], 0.3, None)
            assert not got.isnan().any()


def test_one_thread_is_left_as_it_was_found() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before


def test_it_says_which_products_it_uses() -> None:
    wide, half = Cpu(torch.float32), Cpu(torch.bfloat16)
    assert not half.repacks
    assert "only float32" in half.reason
    assert wide.repacks == ("prepacked" in wide.reason)
