"""Rotary position tables: the angles of every position, made once. Source: RoFormer (arXiv:2104.09864); the frequency
bands of 'llama3' scaling as Llama 3.1's reference defines them."""

import math

import torch
from torch import Tensor

from engine.modelspec import ModelSpec, RopeScaling


def rope_tables(spec: ModelSpec, positions: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [positions, 1, head_dim], halves convention; computed in fp32."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    if spec.rope_scaling is not None:
        frequencies = _scaled(frequencies, spec.rope_scaling)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    whole = torch.cat((angles, angles), -1)[:, None, :]
    return whole.cos().to(device, dtype), whole.sin().to(device, dtype)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors)
    # llama3: long wavelengths are stretched by `factor`, short ones kept, those between interpolated
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)
