"""EngineConfig: what was asked of the engine. Never written to; unknown keys fail. Stdlib only."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from engine.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
# What `inferd bench ablate` can switch off beside the prefix cache: the scheduler's parts, then the device's.
FEATURES = ("continuous_batching", "chunked_prefill", "paged_kv", "fast_attention", "compiled_kernels")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`None` and 'auto' mean: let the machine decide (`engine.budget.Resolved` then says what and why)."""

    model_dir: str  # a prepared model: holds manifest.json (engine/manifest.py)
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    memory_limit_bytes: int | None = None
    block_size: int = 16
    prefix_cache: bool = True
    threads: int | None = None
    output_credit: int = 256  # tokens a request may produce that its reader has not taken yet
    daemon_bytes: int = 0  # resident bytes of the daemon, which the memory limit covers too
    state_dir: str | None = None  # the flight recorder's ring; None = none
    cache_dir: str | None = None  # compiled kernels; None = the user's cache
    without: tuple[str, ...] = ()  # FEATURES that are switched off, to see what they are worth
    faults: bool = False  # let the daemon plant faults (engine/device/faults.py)

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError(f"device={self.device!r} is not known", f"one of {', '.join(DEVICES)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is not known", f"one of {', '.join(DTYPES)}")
        for name in self.without:
            if name not in FEATURES:
                raise ConfigError(f"without={name!r} is no feature", f"one of {', '.join(FEATURES)}")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size={self.block_size} is not a power of two")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "memory_limit_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "EngineConfig":
        """Raises ConfigError for a key that is not a field."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(f"unknown engine setting(s): {', '.join(unknown)}")
        return cls(**data)
