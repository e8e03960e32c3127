"""Batch: one step's inputs as a model sees them: flat tokens, their positions and cache slots, and the spans."""

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.ops import Spans


@dataclass(slots=True)
class Batch:
    """`tokens`, `slots` [T] int64; `cos`, `sin` [T, 1, head size] of each token's position."""

    tokens: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    spans: Spans
