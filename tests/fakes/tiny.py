"""Tiny random models of every family, made by transformers, and a tokenizer for them: real files, in milliseconds.

`write_tiny` leaves what a hub would give: config.json, safetensors, tokenizer.json. The models speak nonsense with
conviction: weights are scaled so that logits have margins, and tests can demand identical tokens.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.manifest import Manifest
from engine.modelspec import from_hf_config

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
EOS = 0
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny(family: str, directory: Path, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model of `family` in `directory`; returns it too, as the reference."""
    shape: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    if family == "qwen3":
        shape["head_dim"] = 32  # not hidden / heads: the family's own
    torch.manual_seed(seed)
    config_class, model_class = FAMILIES[family]
    model: PreTrainedModel = model_class(config_class(**{**shape, **overrides})).to(torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(6.0)
            elif "bias" in name or "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model


def write_tokenizer(directory: Path) -> None:
    """Byte-level, without merges: token = end mark (0) or a byte (1-256)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": EOS, **{letter: index + 1 for index, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    configuration = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(configuration), encoding="utf-8")


def prepare_tiny(directory: Path, model: PreTrainedModel) -> Manifest:
    """A manifest beside the weights that `write_tiny` wrote: the directory is its own prepared model."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    parameters = sum(p.numel() for p in model.parameters())
    weights = directory / "model.safetensors"
    manifest = Manifest(
        spec=from_hf_config(config),
        digest=f"tiny-{weights.stat().st_size}",
        source=str(directory),
        name="tiny",
        weights=(weights.name,),
        weights_dtype="float32",
        weights_bytes=weights.stat().st_size,
        parameters=parameters,
        bytes_by_dtype={"F32": weights.stat().st_size},
        eos_token_ids=(EOS,),
        has_chat_template=True,
    )
    manifest.save(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return manifest
