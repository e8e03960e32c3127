"""Pulse: one page of shared memory in which the engine says that it moves, and at what.

The engine's main thread writes it, at each phase of a step and at each layer inside one; the daemon reads it whenever
it likes, without asking: so it is true also while the engine is inside a C library for minutes, and while the daemon's
own loop is late. It must not know who acts on it (daemon/watchdog.py). Enter at `Pulse.create` in the daemon, at
`Pulse.attach` in the engine. Stdlib only.
"""

import mmap
import os
import time
from dataclasses import dataclass

PHASES = (
    *("loading", "idle", "plan", "launch", "collect", "commit", "publish"),
    *("rows", "forward", "logits", "prompt_logprobs", "sample"),
)
_INDEX = {name: index for index, name in enumerate(PHASES)}
_AT, _TICKS, _PHASE, _STEP = range(4)  # 64-bit words, each written whole


@dataclass(frozen=True, slots=True)
class Beat:
    """What the page said: the stamp (monotonic ns) and number of the last tick, the phase and step it was in."""

    at_ns: int
    ticks: int
    phase: str
    step: int


class Pulse:
    """One side of the page. `descriptor` is the memory's file, to be inherited; -1 for a page that nobody shares."""

    def __init__(self, page: mmap.mmap, descriptor: int = -1) -> None:
        self.descriptor = descriptor
        self._page = page
        self._words = memoryview(page).cast("Q")
        self._ticks = 0

    @classmethod
    def create(cls) -> "Pulse":
        """A new page, for an engine that is about to be started. Raises OSError."""
        descriptor = os.memfd_create("inferd-pulse", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return cls(mmap.mmap(descriptor, mmap.PAGESIZE), descriptor)

    @classmethod
    def attach(cls, descriptor: int) -> "Pulse":
        """The page that the daemon made; one of our own for a descriptor below 0."""
        return cls(mmap.mmap(descriptor, mmap.PAGESIZE), descriptor)

    def tick(self, phase: str) -> None:
        """We move, and this is what we are at. One of PHASES."""
        words = self._words
        self._ticks += 1
        words[_PHASE] = _INDEX[phase]
        words[_AT] = time.monotonic_ns()
        words[_TICKS] = self._ticks

    def step(self, number: int) -> None:
        self._words[_STEP] = number

    def read(self) -> Beat:
        """Safe from any thread. Raises ValueError once it is closed."""
        at_ns, ticks, phase, step = self._words[:4]
        return Beat(at_ns, ticks, PHASES[phase % len(PHASES)], step)

    def close(self) -> None:
        self._words.release()
        self._page.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
