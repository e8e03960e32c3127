"""What the served families share: pre-norm layers of rotary grouped-query attention and a gated SiLU.

Owns the names and shapes of such a layer's tensors; which of the variations a family has is its own file's to say.
Enter at `decoder`.
"""

from engine.kernels.ops import Ops
from engine.layers.attention import Attention
from engine.layers.decoder import Decoder, GatedMLP, Layer
from engine.load.assign import Weights
from engine.modelspec import ModelSpec


def decoder(
    spec: ModelSpec,
    weights: Weights,
    ops: Ops,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
) -> Decoder:
    """`head_norms`: q and k are normed per head before rotation. Layers attend within the windows that the spec gives
    them. Raises CorruptModel if the checkpoint lacks a tensor or has another shape."""
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner, eps = spec.hidden_size, spec.intermediate_size, spec.rms_norm_eps
    layers = []
    for index in range(spec.num_layers):
        at = f"model.layers.{index}"
        attend, mlp = f"{at}.self_attn", f"{at}.mlp"
        qkv, gate_up = [f"{attend}.{part}_proj" for part in "qkv"], [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        norms = None
        if head_norms:
            q_norm, k_norm = (weights.norm(f"{attend}.{part}_norm.weight", spec.head_dim, eps) for part in "qk")
            norms = (q_norm, k_norm)
        layers.append(
            Layer(
                attention_norm=weights.norm(f"{at}.input_layernorm.weight", hidden, eps),
                attention=Attention(
                    ops,
                    spec,
                    qkv=weights.linear(qkv, [heads, kv, kv], hidden, bias=qkv_bias),
                    out=weights.linear([f"{attend}.o_proj"], [hidden], heads, bias=out_bias),
                    window=spec.window(index),
                    norms=norms,
                ),
                mlp_norm=weights.norm(f"{at}.post_attention_layernorm.weight", hidden, eps),
                mlp=GatedMLP(
                    ops,
                    gate_up=weights.linear(gate_up, [inner, inner], hidden, bias=mlp_bias),
                    down=weights.linear([f"{mlp}.down_proj"], [hidden], inner, bias=mlp_bias),
                ),
            )
        )
    return weights.decoder(spec, layers)
