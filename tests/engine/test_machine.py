"""What a CPU computes in, unasked; and what an engine process gets in its environment."""

import os
import subprocess
import sys

import pytest

from engine import machine, toolchain
from engine.config import EngineConfig
from engine.environment import environment

AVX2 = frozenset({"avx2", "fma", "f16c"})
BF16 = AVX2 | {"avx512_bf16"}


@pytest.mark.parametrize(
    ("flags", "compiler", "dtype"),
    [
        (AVX2, "g++", "float32"),
        (BF16, "g++", "float32"),  # twice as fast as bf16 at one row, and faster at 48
        (BF16, None, "bfloat16"),
        (AVX2, None, "float32"),
        (frozenset[str](), "g++", "float32"),
    ],
)
def test_compiled_kernels_come_first_then_native_bf16(
    flags: frozenset[str], compiler: str | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "_compiler", lambda: compiler)
    assert machine._dtype(EngineConfig(model_dir="m"), flags)[0] == dtype
    assert machine._dtype(EngineConfig(model_dir="m", dtype="float16"), flags)[0] == "float16"


_GROWS = """
import torch, psutil
torch.set_num_threads(1)
weight = torch.ones(512, 512, dtype=torch.bfloat16)
def products(counts):
    for count in counts:
        torch.nn.functional.linear(torch.ones(count, 512, dtype=torch.bfloat16), weight)
products([1, 2, 3])
def grown(counts):
    before = psutil.Process().memory_info().rss
    products(counts)
    return (psutil.Process().memory_info().rss - before) >> 20
print(grown(range(4, 320)), grown(range(320, 640)))
"""


def test_what_is_kept_for_each_shape_of_a_product_is_bounded() -> None:
    """Of as many shapes again it keeps none more. How much one takes differs by machine: up to a megabyte on a CPU
    with bf16, nothing without."""
    env = {**os.environ, **environment(1)}
    done = subprocess.run([sys.executable, "-c", _GROWS], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    first, more = map(int, done.stdout.split())
    assert more < first / 2 + 40
