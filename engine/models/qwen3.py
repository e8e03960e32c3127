"""Qwen3 (dense): no biases; q and k are normed per head before rotation. Source: arXiv:2505.09388."""

from engine.kernels.ops import Ops
from engine.layers.decoder import Decoder
from engine.load.assign import Weights
from engine.models import prenorm
from engine.modelspec import ModelSpec


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> Decoder:
    """The decoder. Raises CorruptModel if the checkpoint lacks a tensor or has another shape."""
    return prenorm.decoder(
        spec, weights, ops, qkv_bias=spec.attention_bias, out_bias=spec.attention_out_bias, head_norms=True
    )
