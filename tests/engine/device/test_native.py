"""The compiled table against the plain one, kind by kind; and what it promises beyond: the very weights of the file,
and results that do not depend, to the bit, on what shares the batch."""

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from engine import toolchain
from engine.device.start import _default_cache
from engine.kernels.native import Native
from engine.kernels.ops import Span, Spans
from engine.kernels.reference import Reference
from engine.machine import cpu
from engine.packing import BLOCK, KINDS, ROW_BLOCK_BYTES, packed_bytes
from engine.quant.blocks import Blocks

PLAIN = Reference()
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.fixture(scope="module")
def native() -> Iterator[Native]:
    yield Native(toolchain.library(_default_cache(), cpu()[0]), 2)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(kind: str, rows: int, columns: int) -> tuple[Tensor | Blocks, Tensor]:
    """A weight as a checkpoint has it, and its numbers by the gguf package (or by torch)."""
    numbers = random(rows, columns, seed=rows) / 7
    if kind in DTYPES:
        stored = numbers.to(DTYPES[kind])
        return stored, stored.float()
    type_ = gguf.GGMLQuantizationType[kind]
    data = gguf.quantize(numbers.numpy(), type_)
    plain = torch.from_numpy(np.ascontiguousarray(gguf.dequantize(data, type_)))
    return Blocks(torch.from_numpy(data.copy()), kind), plain


@pytest.mark.parametrize("kind", ROW_BLOCK_BYTES)
def test_blocks_are_the_numbers_that_the_gguf_package_reads(kind: str) -> None:
    blocks, plain = weight_of(kind, 48, 96)
    assert isinstance(blocks, Blocks)
    assert blocks.shape == (48, 96)
    assert torch.equal(blocks.plain(), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_gives_back_the_very_rows(native: Native, kind: str) -> None:
    weight, plain = weight_of(kind, 50, 96)
    tokens = torch.tensor([0, 49, 17, 17])
    take, head = native.table(weight, product=False)
    assert head is None
    assert torch.equal(take(tokens), plain[tokens])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 97, 200])
def test_products(native: Native, kind: str, rows: int) -> None:
    """Outputs that fill no tile, and inputs that fill no block where the kind allows it."""
    columns = 100 if kind in DTYPES else 96
    weight, plain = weight_of(kind, 83, columns)
    x, bias = random(rows, columns, seed=2), random(83, seed=1)
    for offset in (None, bias):
        ours = native.linear(weight, offset)(x)
        torch.testing.assert_close(ours, PLAIN.linear(plain, offset)(x), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_company(native: Native, kind: str) -> None:
    weight, _ = weight_of(kind, 83, 96)
    product, x = native.linear(weight), random(120, 96, seed=2)
    alone = torch.cat([product(x[i : i + 1]) for i in range(120)])
    for size in (2, 3, 4, 7, 120):
        assert torch.equal(torch.cat([product(part) for part in x.split(size)]), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_knows_how_much_packed_weights_take(native: Native, kind: str) -> None:
    for rows, columns in ((16, 32), (83, 96), (1, 32), (49152, 576)):
        said = native._lib.inferd_packed_bytes(KINDS.index(kind), rows, columns)
        assert said == packed_bytes(kind, rows, columns) == native.resident_bytes(kind, rows, columns)


def test_norm_rotation_and_gate(native: Native) -> None:
    x, weight = random(5, 83), random(83, seed=1)
    torch.testing.assert_close(native.rms_norm(x, weight, 1e-5), PLAIN.rms_norm(x, weight, 1e-5), atol=2e-6, rtol=2e-6)
    heads, angles = random(5, 6, 32), random(5, 1, 16)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    plain = PLAIN.rotate(heads[:, :4], cos, sin)
    torch.testing.assert_close(native.rotate(heads.clone()[:, :4], cos, sin), plain, atol=2e-6, rtol=2e-6)
    wide = torch.cat((random(5, 83) * 30, random(5, 83, seed=1)), 1)
    torch.testing.assert_close(native.silu_mul(wide), PLAIN.silu_mul(wide), atol=2e-6, rtol=2e-6)


def test_store(native: Native) -> None:
    slots, values = torch.tensor([9, 2, 30]), random(3, 6, 8)[:, 4:]
    ours, plain = torch.zeros(2, 2, 40, 8)
    native.store(ours, slots, values)
    PLAIN.store(plain, slots, values)
    assert torch.equal(ours, plain)


def paged(shapes: list[tuple[int, int]], block_size: int) -> Spans:
    """Spans of (count, start), each with blocks of its own in random order."""
    longest = -(-max(count + start for count, start in shapes) // block_size)
    order = torch.randperm(len(shapes) * longest, generator=torch.Generator().manual_seed(5))
    table = order.view(len(shapes), longest)
    spans, begin = [], 0
    for row, (count, start) in enumerate(shapes):
        blocks = table[row, : -(-(count + start) // block_size)]
        slots = (blocks[:, None] * block_size + torch.arange(block_size)).view(-1)[: count + start]
        spans.append(Span(begin, count, start, None, slots, row))
        begin += count
    return Spans(spans, table, block_size)


@pytest.mark.parametrize("window", [None, 7, 150])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 16), (9, 3, 64), (8, 1, 32), (4, 2, 24)])
def test_attend(native: Native, window: int | None, heads: int, kv_heads: int, size: int) -> None:
    """Decodes short and long, a first chunk, a later one; 24 is a head size that the compiled kernel does not take."""
    shapes = [(1, 0), (1, 12), (1, 700), (5, 0), (140, 33)]
    spans = paged(shapes, 16)
    slots = spans.table.numel() * 16
    keys, values = random(kv_heads, slots, size), random(kv_heads, slots, size, seed=1)
    q = random(sum(count for count, _ in shapes), heads, size, seed=3)
    ours = native.attend(q, keys, values, spans, 0.25, window)
    torch.testing.assert_close(ours, PLAIN.attend(q, keys, values, spans, 0.25, window), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 37])
def test_attention_does_not_depend_on_how_a_prompt_is_cut(native: Native, window: int | None) -> None:
    whole = paged([(130, 0)], 16)
    keys, values = random(3, 144, 64), random(3, 144, 64, seed=1)
    q = random(130, 9, 64, seed=3)
    once = native.attend(q, keys, values, whole, 0.25, window)
    for size in (1, 5, 64):
        cuts = [Span(0, min(size, 130 - at), at, None, None) for at in range(0, 130, size)]
        parts = [
            native.attend(
                q[cut.start : cut.length], keys, values, Spans([cut], whole.table, whole.block_size), 0.25, window
            )
            for cut in cuts
        ]
        assert torch.equal(torch.cat(parts), once)


def test_what_was_never_written_is_never_read(native: Native) -> None:
    keys, values = torch.full((2, 2, 64, 16), float("nan"))
    keys[:, 32:44], values[:, 32:44] = random(2, 12, 16), random(2, 12, 16, seed=1)
    for count, start in ((1, 11), (12, 0)):
        spans = Spans([Span(0, count, start, None, None)], torch.tensor([[2]]), 16)
        assert not native.attend(random(count, 4, 16, seed=2), keys, values, spans, 0.3, None).isnan().any()


def test_a_machine_that_cannot_compile_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    able = frozenset({"avx2", "fma", "f16c"})
    assert "no f16c" in toolchain.missing(able - {"f16c"})
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler" in toolchain.missing(able)
    with pytest.raises(toolchain.CannotCompile, match="no C\\+\\+ compiler"):
        toolchain.library(tmp_path, able)
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'api.cpp:1: error: no such thing' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    said: list[str] = []
    with pytest.raises(toolchain.CannotCompile, match="error: no such thing"):
        toolchain.library(tmp_path, able, lambda: said.append("compiling"))
    assert said == ["compiling"]
    assert not list((tmp_path / "kernels").iterdir())


def test_a_block_is_the_same_everywhere() -> None:
    assert BLOCK == 32
    assert set(ROW_BLOCK_BYTES) < set(KINDS)
