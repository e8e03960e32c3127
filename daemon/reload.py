"""Reload: what a SIGHUP asks for. The settings are read again from all their sources; limits that changed and may
change while serving are proposed to the arbiter, and what else changed is named in the log: it needs a restart.

It must not apply anything itself. A file that cannot be read or a limit that is refused changes nothing. Enter at
`Reload.again`.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from daemon.port import EngineView
from daemon.settings import NAMES, Loaded
from engine.budget import Limits
from engine.errors import EngineFault, InferdError

log = logging.getLogger("inferd.reload")

# Setting → the limit that it is the ceiling of at start, and the value of while serving.
LIVE: Final = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_model_len": "context_limit",
}


class Reload:
    """`read` reads the settings, `view` is the engine's, `propose` the arbiter's."""

    def __init__(
        self,
        loaded: Loaded,
        read: Callable[[], Loaded],
        view: Callable[[], EngineView],
        propose: Callable[[dict[str, int], str, str], Awaitable[Limits]],
    ) -> None:
        self._loaded = loaded
        self._read = read
        self._view = view
        self._propose = propose

    async def again(self) -> None:
        """Read, compare with what was read before, propose. Never raises for what an operator can have written."""
        try:
            loaded = self._read()
            changed = _changed(self._loaded, loaded)
            limits = self._limits({name: value for name, value in changed.items() if name in LIVE})
            if limits:
                await self._propose(limits, "config", "SIGHUP: the settings were read again")
        except InferdError as error:
            log.error("SIGHUP: nothing was changed: %s", error)
            return
        self._loaded = loaded
        rest = sorted(changed.keys() - LIVE.keys())
        if limits:
            log.info("SIGHUP: in force now: %s", ", ".join(f"{name}={value}" for name, value in sorted(limits.items())))
        if rest:
            log.warning("SIGHUP: %s cannot change while serving: restart to apply", ", ".join(rest))
        if not changed:
            log.info("SIGHUP: no setting has changed")

    def _limits(self, wanted: dict[str, int | None]) -> dict[str, int]:
        """As limits; one whose setting is gone is its ceiling."""
        if not wanted:
            return {}
        view = self._view()
        if view.resolved is None:
            raise EngineFault(f"the engine is {view.state}: send the signal again when it is ready")
        ceilings = view.resolved.ceilings()
        return {LIVE[name]: ceilings[LIVE[name]] if value is None else value for name, value in wanted.items()}


def _changed(before: Loaded, after: Loaded) -> dict[str, Any]:
    """Settings whose value differs, with the new one."""
    pairs = {name: (getattr(before.settings, name), getattr(after.settings, name)) for name in NAMES}
    return {name: new for name, (old, new) in pairs.items() if new != old}
