"""MachineFacts: what was measured of the machine before the memory plan is made; and the cost model of a step's memory.

Owns the facts and how a Linux host without an accelerator yields them (`host_facts`); a CUDA device's are filled in by
engine/device/start.py, which may ask its driver. No torch: `inferd serve --plan` and `models inspect` come here too.
It must not decide anything: that is engine/budget.py.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from engine import toolchain
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.layout import DTYPE_BYTES
from engine.manifest import Manifest
from engine.modelspec import ModelSpec
from engine.packing import resident_bytes
from telemetry import probe

# Resident bytes of an engine process that has imported torch's CPU build and touched its thread pool, before the first
# booking. Only for plans made without starting an engine; a starting engine measures itself.
TORCH_RUNTIME_BYTES = 256 << 20
_NATIVE_BF16 = ("avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCost:
    """Peak bytes of one step beyond weights and KV, as a linear model of its shape. Coefficients that a device has
    measured on itself replace the estimate."""

    fixed_bytes: int  # a step of any shape: e.g. one chunk of prompt log-probabilities
    token_bytes: int  # per granted position: residual stream and fused projections
    row_bytes: int  # per row that samples: logits and the sampler's scratch
    context_bytes: int  # per position of context: attention scores of one chunk of queries

    def peak(self, tokens: int, rows: int, context: int) -> int:
        """Bytes of the largest step with so many granted positions, sampling rows and positions of context."""
        return self.fixed_bytes + tokens * self.token_bytes + rows * self.row_bytes + context * self.context_bytes

    @classmethod
    def estimate(cls, spec: ModelSpec, dtype: str, query_chunk: int = 128, logprob_chunk: int = 32) -> "ActivationCost":
        """From the architecture alone. Live at once: two residuals and a norm, q/k/v and the attention's output, the
        MLP's two halves and their product; logits in fp32 with log-softmax, sorted values and int64 indices."""
        width = DTYPE_BYTES[dtype]
        heads = spec.num_heads * spec.head_dim
        qkv = heads + 2 * spec.num_kv_heads * spec.head_dim
        logits = spec.vocab_size * (4 + 4 + 4 + 8)
        return cls(
            fixed_bytes=logprob_chunk * logits,
            token_bytes=width * (3 * spec.hidden_size + qkv + heads + 3 * spec.intermediate_size),
            row_bytes=logits,
            context_bytes=2 * 4 * spec.num_heads * query_chunk,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Bytes are of the device that holds weights and KV; on a CPU that is the host, and `runtime_bytes` includes the
    daemon, which shares it."""

    device: str  # cpu | cuda
    device_name: str
    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None
    threads: int
    threads_reason: str
    dtype: str
    dtype_reason: str
    runtime_bytes: int
    weights_bytes: int  # as resident: packed, or in `dtype`, copies included
    activation: ActivationCost
    workspace_bytes: int = 0


def host_facts(config: EngineConfig, manifest: Manifest, runtime_bytes: int = TORCH_RUNTIME_BYTES) -> MachineFacts:
    """This host as a CPU device for this model. `runtime_bytes`: the engine's resident bytes before any booking."""
    flags, name = cpu()
    dtype, dtype_reason = _dtype(config, flags)
    threads, threads_reason = _threads(config)
    memory = probe.host_memory()
    if memory is None:
        raise ConfigError(
            "this host does not say how much memory it has: there is no /proc/meminfo", "inferd runs on Linux"
        )
    return MachineFacts(
        device="cpu",
        device_name=name,
        total_bytes=memory.total_bytes,
        available_bytes=memory.available_bytes,
        cgroup_limit_bytes=probe.cgroup().limit_bytes,
        threads=threads,
        threads_reason=threads_reason,
        dtype=dtype,
        dtype_reason=dtype_reason,
        runtime_bytes=runtime_bytes + config.daemon_bytes,
        weights_bytes=resident_bytes(manifest, dtype, packed=dtype == "float32" and not toolchain.missing(flags)),
        activation=ActivationCost.estimate(manifest.spec, dtype),
    )


def cpu(path: Path = Path("/proc/cpuinfo")) -> tuple[frozenset[str], str]:
    """Feature flags and name of the first processor; empty where the kernel does not say."""
    flags: frozenset[str] = frozenset()
    name = "CPU"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return flags, name
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split()), name
        if key.strip() == "model name":
            name = value.strip()
    return flags, name


def _dtype(config: EngineConfig, flags: frozenset[str]) -> tuple[str, str]:
    if config.dtype != "auto":
        return config.dtype, "asked for (--dtype)"
    if not toolchain.missing(flags):
        return "float32", "the compiled kernels: weights stay as the file has them, computed in float32"
    native = [flag for flag in _NATIVE_BF16 if flag in flags]
    if native:
        return "bfloat16", f"this CPU computes bf16 natively ({native[0]}), and the compiled kernels cannot be made"
    return "float32", "this CPU has no native bf16 (avx512_bf16, amx), where bf16 is 5-10 times slower in a batch"


def _threads(config: EngineConfig) -> tuple[int, str]:
    if config.threads:
        return config.threads, "asked for (threads)"
    usable = len(os.sched_getaffinity(0))
    return usable, f"the {usable} cores this process may use"
