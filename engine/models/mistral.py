"""Mistral: Llama's layer without biases, its attention limited to a sliding window. Source: arXiv:2310.06825."""

from engine.kernels.ops import Ops
from engine.layers.attention import Attention
from engine.layers.decoder import Decoder, GatedMLP, Layer
from engine.load.assign import Weights
from engine.modelspec import ModelSpec


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> Decoder:
    """The decoder. Raises CorruptModel if the checkpoint lacks a tensor or has another shape."""
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner, eps = spec.hidden_size, spec.intermediate_size, spec.rms_norm_eps
    layers = []
    for index in range(spec.num_layers):
        at = f"model.layers.{index}"
        qkv = [f"{at}.self_attn.{part}_proj" for part in "qkv"]
        gate_up = [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"]
        layers.append(
            Layer(
                attention_norm=weights.norm(f"{at}.input_layernorm.weight", hidden, eps),
                attention=Attention(
                    ops,
                    spec,
                    qkv=weights.linear(qkv, [heads, kv, kv], hidden),
                    out=weights.linear([f"{at}.self_attn.o_proj"], [hidden], heads),
                    window=spec.window(index),
                ),
                mlp_norm=weights.norm(f"{at}.post_attention_layernorm.weight", hidden, eps),
                mlp=GatedMLP(
                    ops,
                    gate_up=weights.linear(gate_up, [inner, inner], hidden),
                    down=weights.linear([f"{at}.mlp.down_proj"], [hidden], inner),
                ),
            )
        )
    return weights.decoder(spec, layers)
