"""The CPU's tables with the oracle's attention: what fast attention is worth is measured against it.

Owns nothing but the choice. Enter at `NaiveNative` and `NaiveCpu`.
"""

from torch import Tensor

from engine.kernels.cpu import Cpu
from engine.kernels.native import Native
from engine.kernels.ops import Spans
from engine.kernels.reference import Reference


class NaiveNative(Native):
    """Compiled products; attention one sequence after the other, with repeated heads and all scores at once."""

    name = "native, naive attention"
    reason = "compiled kernels, but for attention: switched off"

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float, window: int | None) -> Tensor:
        return Reference.attend(self, q, keys, values, spans, scale, window)


class NaiveCpu(Cpu):
    """The same over torch's operators."""

    name = "cpu, naive attention"

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float, window: int | None) -> Tensor:
        return Reference.attend(self, q, keys, values, spans, scale, window)
