"""Threads that can be told apart from outside: `top -H`, `ps -L` and tests/perf read their names.

Enter at `name_this_thread`, called in the thread itself.
"""

import contextlib
import threading
from pathlib import Path

_LONGEST = 15  # of the kernel


def name_this_thread(name: str) -> None:
    """Give the kernel's thread this name; where that cannot be done, it keeps the process's."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:_LONGEST])
