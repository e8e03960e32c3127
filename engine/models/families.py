"""Which file runs which family: a family NAME is the module engine/models/NAME.py with a `build`."""

import importlib
from collections.abc import Callable

from engine.errors import UnknownArchitecture
from engine.kernels.ops import Ops
from engine.layers.decoder import Decoder
from engine.load.assign import Weights
from engine.modelspec import ModelSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def builder(family: str) -> Callable[[ModelSpec, Weights, Ops], Decoder]:
    """Raises UnknownArchitecture."""
    if family not in FAMILIES:
        raise UnknownArchitecture(f"no decoder for the family {family!r}", f"served are {', '.join(FAMILIES)}")
    build: Callable[[ModelSpec, Weights, Ops], Decoder] = importlib.import_module(f"engine.models.{family}").build
    return build
