"""A daemon for perf scripts: tests/served.py's, with state of its own that is gone afterwards. Torch-free."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.served import INFERD, Served
from tests.soaking import anonymous_bytes

__all__ = ["INFERD", "Served", "anonymous_bytes", "serving"]


@contextmanager
def serving(
    *flags: str, model: str = "smollm2", env: Mapping[str, str] | None = None, command: Sequence[str] = INFERD
) -> Iterator[Served]:
    """`inferd serve MODEL FLAGS…` on a free port; `env` adds variables. Raises AssertionError with the end of its log
    if it does not get ready, RuntimeError if it does not end in order."""
    with tempfile.TemporaryDirectory(prefix="inferd-perf-") as folder:
        daemon = Served(Path(folder), model, *flags, env=dict(env or {}), command=command)
        try:
            yield daemon.start()
        finally:
            code = daemon.stop()
        if code:
            raise RuntimeError(f"inferd serve ended with {code}:\n{daemon.log[-2000:]}")
