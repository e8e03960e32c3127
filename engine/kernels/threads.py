"""How many threads torch's operators take. It owns one decision: an operator that is over in some microseconds runs on
the thread that calls it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the operators inside on the calling thread alone.

    A parallel region ends when its slowest thread does, and a thread that has to be woken, or waits for a core that the
    daemon has just taken, comes milliseconds late. For an operator of 20 µs that is the whole cost; for a product of
    1 ms it is not. Entering and leaving takes about 1 µs together.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
