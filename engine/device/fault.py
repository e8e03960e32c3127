"""Fault: what every planted fault of the device plane is; faults.py plants them. Enter at `Fault`."""

import contextlib
from contextlib import AbstractContextManager
from typing import Final

from engine.device.meter import Readings

LEARNED_STEPS: Final = 12  # observed before a limit is set


class Fault:
    """Nothing, until a subclass says what. `over`: it is done and can be forgotten."""

    over = False

    @property
    def learning(self) -> bool:
        """Whether it watches typical steps first."""
        return False

    def before_step(self) -> None:
        """A quiet moment between two steps."""

    def step(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def readings(self) -> Readings | None:
        """None: the real meter's are the truth."""
        return None

    def amended(self, real: Readings) -> Readings:
        """The real meter's readings with what only the fault knows."""
        return real

    def end(self) -> None:
        """Give back what was taken."""
