"""ModelSpec: the numbers of an architecture, from a Hugging Face config.json or a GGUF header.

Stdlib only. It must not read weights. Enter at `from_hf_config` or `ModelSpec.from_dict`.
"""

from dataclasses import asdict, dataclass
from typing import Any

from engine.errors import CorruptModel, UnknownArchitecture


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """`kind` is 'linear', 'llama3' (the frequency-band scaling of Llama 3.1), or 'factors' (the same, worked out: one
    divisor a frequency, as a GGUF keeps it)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()


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

    def window(self, layer: int) -> int | None:
        """The layer's sliding window in tokens; None = full attention."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """2 x layers x KV heads x head size x bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    @property
    def context_doubling(self) -> int:
        """The context, in tokens, at which a position takes twice the multiplications of one without any: there
        attention does as many as the weights of a layer."""
        attended = self.num_heads * self.head_dim
        projections = 2 * attended + 2 * self.num_kv_heads * self.head_dim
        weights = self.hidden_size * (projections + 3 * self.intermediate_size)
        return max(1, weights // (2 * attended))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelSpec":
        scaling = data.get("rope_scaling")
        windows = tuple(data.get("sliding_windows") or ())
        return cls(**{**data, "rope_scaling": _restored(scaling), "sliding_windows": windows})


_HF_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def _restored(scaling: dict[str, Any] | None) -> RopeScaling | None:
    return RopeScaling(**{**scaling, "factors": tuple(scaling.get("factors", ()))}) if scaling else None


def from_hf_config(config: dict[str, Any]) -> ModelSpec:
    """From a config.json, of transformers 4 or 5. Raises UnknownArchitecture for what no family of ours is meant for,
    CorruptModel for a config without the numbers it needs."""
    names = config.get("architectures") or []
    family = next((_HF_FAMILIES[name] for name in names if name in _HF_FAMILIES), None)
    if family is None:
        said = ", ".join(names) or config.get("model_type", "nothing")
        raise UnknownArchitecture(f"config.json declares {said}", f"served are {', '.join(_HF_FAMILIES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise UnknownArchitecture(f"activation {config['hidden_act']!r} is not served", "served is silu")
    try:
        heads = int(config["num_attention_heads"])
        rope = config.get("rope_parameters") or {}
        return ModelSpec(
            family=family,
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            max_position=int(config["max_position_embeddings"]),
            # transformers leaves out what equals the class's default: tied for none of these but by their own word
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope_scaling=_scaling(config.get("rope_scaling") or rope),
            sliding_windows=_windows(config, family),
            attention_bias=family == "qwen2" or bool(config.get("attention_bias", False)),
            attention_out_bias=family != "qwen2" and bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptModel(f"config.json lacks or garbles {error}") from error


def _scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position=int(rope["original_max_position_embeddings"]),
        )
    raise UnknownArchitecture(f"rope scaling {kind!r} is not served", "served are linear and llama3")


def _windows(config: dict[str, Any], family: str) -> tuple[int | None, ...]:
    """One a layer, or () where every layer attends to everything."""
    window = config.get("sliding_window")
    layers = int(config["num_hidden_layers"])
    if not window or family == "llama":
        return ()
    if family == "mistral":
        return (int(window),) * layers
    if not config.get("use_sliding_window"):
        return ()
    kinds = config.get("layer_types")
    if kinds:
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    first = int(config.get("max_window_layers", layers))
    return tuple(int(window) if index >= first else None for index in range(layers))


_GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # Mistral's GGUFs call themselves llama


def from_gguf_metadata(
    metadata: dict[str, Any],
    *,
    tied: bool,
    bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    rope_factors: tuple[float, ...] = (),
) -> ModelSpec:
    """From a GGUF's key-value pairs and what only its tensors tell. `tied`: there is no output tensor; `bias`,
    `out_bias`, `mlp_bias`: q, k, v, attention's output and the MLP have biases; `rope_factors`: the rope_freqs tensor.
    Raises UnknownArchitecture, CorruptModel."""
    name = metadata.get("general.architecture")
    family = _GGUF_FAMILIES.get(str(name))
    if family is None:
        raise UnknownArchitecture(f"the GGUF's architecture is {name!r}", f"served are {', '.join(_GGUF_FAMILIES)}")
    try:
        hidden = int(metadata[f"{name}.embedding_length"])
        heads = int(metadata[f"{name}.attention.head_count"])
        head_dim = int(metadata.get(f"{name}.attention.key_length") or hidden // heads)
        vocabulary = metadata.get(f"{name}.vocab_size") or len(metadata["tokenizer.ggml.tokens"])
        _refuse_gguf(metadata, str(name), head_dim)
        layers, window = int(metadata[f"{name}.block_count"]), metadata.get(f"{name}.attention.sliding_window")
        if name == "llama" and window:
            family = "mistral"
        return ModelSpec(
            family=family,
            vocab_size=int(vocabulary),
            hidden_size=hidden,
            intermediate_size=int(metadata[f"{name}.feed_forward_length"]),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(metadata.get(f"{name}.attention.head_count_kv", heads)),
            head_dim=head_dim,
            rms_norm_eps=float(metadata[f"{name}.attention.layer_norm_rms_epsilon"]),
            rope_theta=float(metadata.get(f"{name}.rope.freq_base", 10_000.0)),
            max_position=int(metadata[f"{name}.context_length"]),
            tie_embeddings=tied,
            rope_scaling=_gguf_scaling(metadata, str(name), rope_factors, head_dim),
            sliding_windows=(int(window),) * layers if family == "mistral" and window else (),
            attention_bias=family == "qwen2" or bias,
            attention_out_bias=out_bias,
            mlp_bias=mlp_bias,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptModel(f"the GGUF's header lacks or garbles {error}") from error


def _refuse_gguf(metadata: dict[str, Any], name: str, head_dim: int) -> None:
    """Raises UnknownArchitecture for what the served families do not compute, rather than compute something else."""
    if metadata.get(f"{name}.expert_count"):
        raise UnknownArchitecture("the GGUF is a mixture of experts", "served are dense models")
    rotated = int(metadata.get(f"{name}.rope.dimension_count") or head_dim)
    values = int(metadata.get(f"{name}.attention.value_length") or head_dim)
    if (rotated, values) != (head_dim, head_dim):
        raise UnknownArchitecture(
            f"heads of {head_dim} with {rotated} rotated and {values} value dimensions are not served"
        )


def _gguf_scaling(metadata: dict[str, Any], name: str, factors: tuple[float, ...], head_dim: int) -> RopeScaling | None:
    """Linear scaling is in the metadata; llama3's is a tensor of factors."""
    if factors:
        if len(factors) != head_dim // 2:
            raise CorruptModel(f"{len(factors)} rotary factors for heads of {head_dim}")
        return RopeScaling(kind="factors", factor=1.0, factors=factors)
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(metadata[f"{name}.rope.scaling.factor"]))
    raise UnknownArchitecture(f"rope scaling {kind!r} is not served", "served are linear and llama3")
