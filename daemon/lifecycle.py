"""The daemon's states and what follows from them: who is let in, readiness, what systemd is told.

starting → ready ⇄ degraded (the engine is being restarted, or is stuck) → draining → stopped. Owns the states and the
wish to drain; what the engine does is read from its EngineView, so both loops may ask at any time. It must not know
HTTP beyond the error it refuses with. Enter at `Lifecycle`.
"""

import logging
import os
import socket
import time
from collections.abc import Callable

from daemon.api.errors import ApiError
from daemon.port import EngineView
from telemetry.events import Event, StateChanged

log = logging.getLogger("inferd.lifecycle")

_DRAIN_RETRY_S = 10
_RESTART_RETRY_S = 2


class Lifecycle:
    """Reading (`state`, `readiness`, `gate`) is safe from any thread; `observe`, `drain` and the like are the main
    loop's. `view` is the port's."""

    def __init__(
        self,
        view: Callable[[], EngineView],
        publish: Callable[[Event], None],
        *,
        progress_deadline_s: float,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._view = view
        self._publish = publish
        self._deadline_ns = int(progress_deadline_s * 1e9)
        self._notify = notify
        self._drain_why = ""
        self._stopped = False
        self._announced = ""
        self.was_ready = False

    @property
    def state(self) -> str:
        """starting | ready | degraded | draining | stopped, now."""
        if self._stopped:
            return "stopped"
        if self._drain_why:
            return "draining"
        if self._engine_trouble():
            return "degraded" if self.was_ready else "starting"
        return "ready"

    def readiness(self) -> tuple[bool, str]:
        """Whether requests are served, else why not."""
        why = "the daemon has stopped" if self._stopped else self._drain_why or self._engine_trouble()
        return not why, why

    def gate(self) -> None:
        """Let a new request in, or raise ApiError (503) with Retry-After. A slow engine is no reason to refuse."""
        if self._stopped or self._drain_why:
            raise ApiError(503, "draining: no new requests here", code="draining", retry_after_s=_DRAIN_RETRY_S)
        view = self._view()
        if view.state != "ready":
            why = f": {view.why}" if view.why else ""
            raise ApiError(
                503, f"the engine is {view.state}{why}", code="engine_not_ready", retry_after_s=_RESTART_RETRY_S
            )

    def observe(self) -> None:
        """Notice and announce a change of state; called every so often by the main loop."""
        if not self.was_ready and not self._engine_trouble():
            self.was_ready = True
            self._notify("READY=1")
        state = self.state
        if state != self._announced:
            self._announced = state
            why = self.readiness()[1]
            log.info("state: %s%s", state, f" ({why})" if why else "")
            self._publish(StateChanged(at_ns=time.monotonic_ns(), state=state, why=why))
            self._notify(f"STATUS={state}{': ' + why if why else ''}")

    def drain(self, why: str) -> None:
        """No new requests from now on; those that run go on."""
        self._drain_why = self._drain_why or why
        self.observe()

    def resume(self) -> None:
        """Let requests in again."""
        self._drain_why = ""
        self.observe()

    def stopping(self) -> None:
        """The daemon is on its way out."""
        self._notify("STOPPING=1")
        self.drain("the daemon is shutting down")

    def stopped(self) -> None:
        self._stopped = True
        self.observe()

    def _engine_trouble(self) -> str:
        """Why the engine does not serve; empty if it does."""
        view = self._view()
        if view.state != "ready":
            return f"the engine is {view.state}" + (f": {view.why}" if view.why else "")
        if view.progress_age_ns is not None and view.progress_age_ns > self._deadline_ns:
            return f"the engine has made no progress for {view.progress_age_ns / 1e9:.0f} s"
        return ""


def systemd_notifier() -> Callable[[str], None]:
    """Sends one line to the service manager: a datagram to $NOTIFY_SOCKET (sd_notify(3)); does nothing without it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return lambda _: None
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]

    def notify(line: str) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.sendto(line.encode(), address)
        except OSError as error:
            log.warning("the service manager could not be told %r: %s", line, error)

    return notify


def watchdog_interval_s() -> float | None:
    """How often systemd wants a sign of life (half of $WATCHDOG_USEC), if it does and means this process."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2e6
