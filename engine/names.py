"""The tensors that a model of a given spec has, by Hugging Face name; and what they are called in a GGUF.

Pure tables. It must not read files. Enter at `expected` and `gguf_name`.
"""

from engine.modelspec import ModelSpec

# Hugging Face's name of a module → llama.cpp's, inside a layer and outside of layers
_IN_LAYER = {
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
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER_BACK = {theirs: ours for ours, theirs in _IN_LAYER.items()}
_OUTSIDE_BACK = {theirs: ours for ours, theirs in _OUTSIDE.items()}


def expected(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model needs → its shape. Products are [out, in], as Hugging Face has them."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}."
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        shapes[f"{layer}input_layernorm.weight"] = (hidden,)
        for name, rows in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            shapes[f"{attention}{name}.weight"] = (rows, hidden)
            if spec.attention_bias:
                shapes[f"{attention}{name}.bias"] = (rows,)
        shapes[f"{attention}o_proj.weight"] = (hidden, heads)
        if spec.attention_out_bias:
            shapes[f"{attention}o_proj.bias"] = (hidden,)
        if spec.family == "qwen3":
            shapes[f"{attention}q_norm.weight"] = shapes[f"{attention}k_norm.weight"] = (spec.head_dim,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns in (
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            shapes[f"{mlp}{name}.weight"] = (rows, columns)
            if spec.mlp_bias:
                shapes[f"{mlp}{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def gguf_name(name: str) -> str:
    """llama.cpp's name of the tensor that Hugging Face calls `name`."""
    module, _, kind = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{kind}"
    _, _, index, module = module.split(".", 3)
    return f"blk.{index}.{_IN_LAYER[module]}.{kind}"


def hugging_face_name(name: str) -> str | None:
    """Hugging Face's name of the tensor that llama.cpp calls `name`; None for one that no served family has."""
    module, _, kind = name.rpartition(".")
    if module in _OUTSIDE_BACK:
        return f"{_OUTSIDE_BACK[module]}.{kind}"
    parts = module.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _IN_LAYER_BACK:
        return f"model.layers.{parts[1]}.{_IN_LAYER_BACK[parts[2]]}.{kind}"
    return None


def interleaved(name: str) -> bool:
    """Whether llama.cpp's converter reorders this tensor of a llama (not of qwen): q and k, weights and biases."""
    return ".q_proj." in name or ".k_proj." in name
