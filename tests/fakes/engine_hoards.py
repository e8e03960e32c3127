"""The real engine process with one flaw: at SIGUSR2 it takes 100 MiB that nobody books, and keeps them."""

import mmap
import signal
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":  # run by path: the repository's root is not on the import path yet
    sys.path[0] = str(Path(__file__).parents[2])

from engine.config import EngineConfig
from engine.process import Loaded, load_model, main

HOARD_BYTES = 100 << 20


def argv() -> list[str]:
    """For `EngineSession(argv=...)`."""
    return [sys.executable, str(Path(__file__))]


def load(config: EngineConfig, progress: Callable[[str, float], None]) -> Loaded:
    """The real model; from now on the process can be told to hoard."""
    hoard: list[mmap.mmap] = []

    def take(*_: object) -> None:
        pages = mmap.mmap(-1, HOARD_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for offset in range(0, HOARD_BYTES, mmap.PAGESIZE):
            pages[offset] = 1
        hoard.append(pages)

    signal.signal(signal.SIGUSR2, take)
    return load_model(config, progress)


if __name__ == "__main__":
    main(load)
