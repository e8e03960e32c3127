"""Tiny GGUF files, written with the gguf package as llama.cpp's converter writes the models of tests.fakes.tiny.

`write_gguf` gives the file that converting such a model yields; what is prepared from it must be the model again.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|go|>{% endif %}"
)
END = "<|end|>"
_NORMAL, _CONTROL = 1, 3
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(
    path: Path,
    architecture: str,
    model: PreTrainedModel,
    *,
    pre: str = "smollm",
    template: str | None = TEMPLATE,
    values: dict[str, int | float | str] | None = None,
    quantized: gguf.GGMLQuantizationType | None = None,
    leave_out: str = "",
) -> None:
    """`model` as a GGUF of `architecture`; products in the type `quantized`, if given. `values`: more metadata."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in (values or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    write_tokenizer(writer, config.vocab_size, pre, template)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = _named(name)
        if theirs == leave_out:
            continue
        array = tensor.detach().float().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = _permuted(array, heads)
        _add(writer, theirs, array, quantized if "norm" not in name and array.ndim > 1 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(writer: gguf.GGUFWriter, vocabulary: int, pre: str, template: str | None) -> None:
    """Byte-level: an end mark, the 256 letters, some merges, and control tokens up to `vocabulary`."""
    letters = sorted(_byte_letters())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
    tokens = [END, *letters, *(merge.replace(" ", "") for merge in merges)]
    tokens += [f"<|spare{i}|>" for i in range(vocabulary - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token.startswith("<|") else _NORMAL for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)


def _byte_letters() -> list[str]:
    from tokenizers import pre_tokenizers

    return list(pre_tokenizers.ByteLevel.alphabet())


def _named(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, index, part = module.split(".", 3)
        return f"blk.{index}.{_PARTS[part]}.{kind}"
    return f"{_PARTS[module]}.{kind}"


def _permuted(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As convert_hf_to_gguf.py does it to q and k of a llama."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _add(
    writer: gguf.GGUFWriter, name: str, array: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType | None
) -> None:
    array = np.ascontiguousarray(array)
    if kind is None:
        writer.add_tensor(name, array)
    elif kind is gguf.GGMLQuantizationType.F16:
        writer.add_tensor(name, array.astype(np.float16))
    elif kind is gguf.GGMLQuantizationType.BF16:
        bits = torch.from_numpy(array).bfloat16().view(torch.uint8).numpy()
        writer.add_tensor(name, bits, raw_dtype=kind)
    else:
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
