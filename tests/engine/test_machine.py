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
before = psutil.Process().memory_info().rss
products(range(4, 1000))
print((psutil.Process().memory_info().rss - before) >> 20)
"""
_BOUNDS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
# What is given back to glibc goes back to the system at once, so that only what is still held is counted.
_NO_HOARD = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0", "MALLOC_MMAP_THRESHOLD_": str(64 << 10)}


def _grown(env: dict[str, str]) -> int:
    """MiB that a process keeps of a thousand shapes."""
    done = subprocess.run([sys.executable, "-c", _GROWS], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_what_is_kept_for_each_shape_of_a_product_is_bounded() -> None:
    """Of a thousand shapes it keeps a quarter or so. How much one takes differs by machine: up to a megabyte on a CPU
    with bf16, nothing without."""
    unbounded = {name: value for name, value in os.environ.items() if name not in _BOUNDS} | _NO_HOARD
    assert _grown({**unbounded, **environment(1)}) < _grown(unbounded) * 0.6 + 40
