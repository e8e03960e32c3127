"""Shortage: memory that the daemon itself could not get, wherever in it that happened, becomes an incident.

Owns which errors say so, and how often it is told. Whoever fails logs its exception anyway, so a handler of the log
sees every such failure, whichever thread or library it was in; the engine's own shortages are its own to report
(engine/autopsy.py). It must not know who failed. Enter at `Shortage`, a handler for the root logger.
"""

import errno
import logging
import mmap
import time
from collections.abc import Callable
from contextlib import suppress

from telemetry import probe
from telemetry.events import Event, Incident
from telemetry.evidence import SHARED_SCOPES, FailedStep, MemoryFault, Reading
from telemetry.forensics import judge_memory

_REST_S = 60.0  # between two incidents: one shortage fails in many places
_RESERVE_BYTES = 4 << 20  # of addresses: to say that there is no memory takes some


class Shortage(logging.Handler):
    """Publishes an incident for a log record that carries an error for want of memory."""

    def __init__(self, publish: Callable[[Event], None], clock: Callable[[], int] = time.monotonic_ns) -> None:
        super().__init__(logging.ERROR)
        self._publish = publish
        self._clock = clock
        self._told_ns: int | None = None
        self._reserve: mmap.mmap | None = mmap.mmap(-1, _RESERVE_BYTES)
        self._first = _reading(clock())

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler; logging locks around it."""
        error = record.exc_info[1] if record.exc_info else None
        now_ns = self._clock()
        rests = self._told_ns is not None and now_ns - self._told_ns < _REST_S * 1e9
        if error is None or rests or not lacks_memory(error):
            return
        self._told_ns = now_ns
        if self._reserve is not None:
            self._reserve.close()
        self._publish(self._incident(f"{record.name}: {record.getMessage()}", now_ns))
        self._reserve = None
        with suppress(OSError, MemoryError):  # the next time is told without it
            self._reserve = mmap.mmap(-1, _RESERVE_BYTES)

    def _incident(self, where: str, now_ns: int) -> Incident:
        fault = MemoryFault(
            requested_bytes=0, step=FailedStep(step=0, phase="the daemon"), first=self._first, at=_reading(now_ns)
        )
        verdict = judge_memory(fault)
        return Incident(
            at_ns=now_ns,
            incident_id=f"oom-{now_ns}",
            kind="oom",
            cause=verdict.cause,
            summary=f"the daemon could not get memory ({where}); the engine is another process",
            clues=verdict.clues,
            knobs=verdict.knobs,
            memory=fault,
        )


def lacks_memory(error: BaseException | None) -> bool:
    """Whether this error, or one that it came from, is about memory that could not be had."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        error = error.__cause__ or error.__context__
    return False


def _reading(now_ns: int) -> Reading:
    own = probe.resident()
    scope, limit, free = probe.nearest_limit()
    held = own.total_bytes if own else None
    others = None
    if scope in SHARED_SCOPES and limit is not None and free is not None and held is not None:
        others = max(0, limit - free - held)
    return Reading(
        at_ns=now_ns, scope=scope, limit_bytes=limit, free_bytes=free, own_bytes=held, neighbour_bytes=others
    )
