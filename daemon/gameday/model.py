"""A model for game day: tiny, random, written in a moment; so shaped that a long prompt's activations, and the
log-probabilities of a short one, are each larger than what a typical step takes.

Owns its files, as `inferd models prepare` would leave them. No torch. Enter at `write`.
"""

import json
from pathlib import Path
from typing import Any, Final

NAME: Final = "gameday"
_SEED: Final = 7
_SHAPE: Final[dict[str, Any]] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 12288,
    "hidden_size": 64,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}


def write(directory: Path) -> Path:
    """The model in `directory`, which is made. Returns it."""
    from safetensors.numpy import save_file

    from engine.manifest import Manifest
    from engine.modelspec import from_hf_config

    directory.mkdir(parents=True, exist_ok=True)
    weights = _weights()
    path = directory / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_SHAPE), encoding="utf-8")
    _write_tokenizer(directory / "tokenizer.json")
    size = path.stat().st_size
    Manifest(
        spec=from_hf_config(_SHAPE),
        digest=f"{NAME}-{size}",
        source=str(directory),
        name=NAME,
        weights=(path.name,),
        weights_dtype="float32",
        weights_bytes=size,
        parameters=sum(int(tensor.size) for tensor in weights.values()),
        bytes_by_dtype={"F32": size},
        eos_token_ids=(0,),
    ).save(directory)
    return directory


def _weights() -> dict[str, Any]:
    """By Hugging Face's names; (out, in) as torch has them."""
    import numpy as np

    chance = np.random.default_rng(_SEED)
    hidden, inner = _SHAPE["hidden_size"], _SHAPE["intermediate_size"]
    narrow = hidden // _SHAPE["num_attention_heads"] * _SHAPE["num_key_value_heads"]
    shapes = {"model.embed_tokens": (_SHAPE["vocab_size"], hidden), "lm_head": (_SHAPE["vocab_size"], hidden)}
    norms = ["model.norm"]
    for number in range(_SHAPE["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.self_attn.{part}_proj": (hidden, hidden) for part in "qo"}
        shapes |= {f"{layer}.self_attn.{part}_proj": (narrow, hidden) for part in "kv"}
        shapes |= {f"{layer}.mlp.{part}_proj": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (hidden, inner)
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
    made = {f"{name}.weight": chance.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    return {**made, **{f"{name}.weight": np.ones(hidden, np.float32) for name in norms}}


def _write_tokenizer(path: Path) -> None:
    """Byte-level, without merges: a token is the end mark (0) or a byte (1-256)."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={"<|end|>": 0, **{each: 1 + n for n, each in enumerate(letters)}}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(path))
