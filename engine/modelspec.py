"""ModelSpec: the numbers of an architecture, from a Hugging Face config.json or a GGUF header.

Stdlib only. It must not read weights. Enter at `from_hf_config` or `ModelSpec.from_dict`.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """`kind` is 'linear' or 'llama3' (the frequency-band scaling of Llama 3.1)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only transformer. `family` names the file in engine/models that runs it."""

    family: str  # llama | mistral | qwen2 | qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    tie_embeddings: bool
    rope_scaling: RopeScaling | None = None
    sliding_windows: tuple[int | None, ...] = ()  # one a layer; empty = full attention everywhere
    attention_bias: bool = False  # on q, k, v
    attention_out_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """2 x layers x KV heads x head size x bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelSpec":
        scaling = data.get("rope_scaling")
        windows = tuple(data.get("sliding_windows") or ())
        return cls(**{**data, "rope_scaling": RopeScaling(**scaling) if scaling else None, "sliding_windows": windows})
