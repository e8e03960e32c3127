"""Qwen2 and Qwen2.5: biases on q, k and v alone; some layers may attend within a window. Source: arXiv:2407.10671."""

from engine.kernels.ops import Ops
from engine.layers.decoder import Decoder
from engine.load.assign import Weights
from engine.models import prenorm
from engine.modelspec import ModelSpec


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> Decoder:
    """The decoder. Raises CorruptModel if the checkpoint lacks a tensor or has another shape."""
    return prenorm.decoder(spec, weights, ops, qkv_bias=True)
