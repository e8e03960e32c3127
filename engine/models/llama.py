"""Llama 2 and 3, SmolLM2, and what else declares itself 'llama': pre-norm, rotary, grouped queries, gated SiLU.

Source: arXiv:2302.13971, arXiv:2307.09288; biases as config.json's attention_bias and mlp_bias say.
"""

from engine.kernels.ops import Ops
from engine.layers.decoder import Decoder
from engine.load.assign import Weights
from engine.models import prenorm
from engine.modelspec import ModelSpec


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> Decoder:
    """The decoder. Raises CorruptModel if the checkpoint lacks a tensor or has another shape."""
    return prenorm.decoder(
        spec, weights, ops, qkv_bias=spec.attention_bias, out_bias=spec.attention_out_bias, mlp_bias=spec.mlp_bias
    )
