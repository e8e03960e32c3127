"""Mistral: Llama's layer without biases, its attention limited to a sliding window. Source: arXiv:2310.06825."""

from engine.kernels.ops import Ops
from engine.layers.decoder import Decoder
from engine.load.assign import Weights
from engine.models import prenorm
from engine.modelspec import ModelSpec


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> Decoder:
    """The decoder. Raises CorruptModel if the checkpoint lacks a tensor or has another shape."""
    return prenorm.decoder(spec, weights, ops)
