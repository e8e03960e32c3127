"""Tuning: the online tuner as a task of the daemon: Snapshots in, proposals to the arbiter out, Decisions to the bus.

Owns the control period, the tuner of the engine that runs, and the file of what was learned. It must not know rules.
Whatever goes wrong in here, serving goes on: the tuner is frozen and says why. Enter at `Tuning.run`; control
routes ask `act` and `status`.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from autotune.memory import Memory, key
from autotune.objective import PRESETS, Targets
from autotune.online import Tuner
from autotune.space import KNOBS, Space
from autotune.watch import window_between
from daemon.limits import LimitsArbiter
from daemon.port import EnginePort
from daemon.settings import Settings
from engine.budget import Limits, Resolved
from engine.errors import ConfigError, EngineFault, InferdError
from telemetry.events import Decision, Event, TargetsMissed
from telemetry.snapshot import Snapshot

log = logging.getLogger("inferd.tuner")

PERIOD_S = 5.0
_SAVE_S = 60.0


def targets_of(settings: Settings) -> Targets:
    """What was asked for: the preset's, where no figure of its own was given."""
    preset = PRESETS[settings.tune_for].targets if settings.tune_for else Targets()
    return Targets(
        ttft_s=settings.target_ttft or preset.ttft_s, inter_token_s=settings.target_inter_token or preset.inter_token_s
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerOrder:
    """What somebody wants of the tuner."""

    set_to: dict[str, int]
    why: str = ""
    freeze: bool = False
    release: bool = False
    pin: tuple[str, ...] = ()


class Tuning:
    """Used from the daemon's loop. `look(seconds)` makes a Snapshot whose latencies are of the last so many seconds."""

    def __init__(
        self,
        port: EnginePort,
        arbiter: LimitsArbiter,
        look: Callable[[int], Snapshot],
        publish: Callable[[Event], None],
        settings: Settings,
        *,
        directory: Path,
        model: str,
        version: str,
        period_s: float = PERIOD_S,
    ) -> None:
        self._port = port
        self._arbiter = arbiter
        self._look = look
        self._publish = publish
        self._on = settings.tuner
        self._purpose = settings.tune_for
        self._targets = targets_of(settings)
        self._memory = Memory(directory)
        self._model, self._version = model, version
        self._period_s = period_s
        self._key = ""
        self._tuner: Tuner | None = None
        self._before: Snapshot | None = None
        self._why = ""  # of the decision under way
        self._saved_s = time.monotonic()
        self._missed: dict[str, str] = {}  # as published
        self._saved_changes = 0

    def begin(self, resolved: Resolved, limits: Limits) -> tuple[Limits, str]:
        """The limits for an engine that has just become ready, and why. Called by the arbiter."""
        if not self._on:
            return limits, "as resolved"
        if self._memory.trouble:
            log.warning("%s", self._memory.trouble)
        self._before = None
        self._key = key(self._model, resolved, self._version)
        if self._tuner is not None:  # an engine in place of a dead one: nothing is forgotten
            self._memory_put()
        learned = self._memory.get(self._key)
        self._tuner = tuner = Tuner(Space.of(resolved), self._targets, self._decided, learned=learned)
        chosen = tuner.first_limits(limits)
        whys = []
        if learned is not None:
            whys.append(f"as learned before, in {learned.decisions} decisions")
        elif self._purpose:
            start = PRESETS[self._purpose].start
            wanted = {name: int(share * resolved.ceilings()[name]) for name, share in start.items()}
            chosen = chosen.replaced(tuner.space.clamped(wanted))
            whys.append(f"--for {self._purpose}: {PRESETS[self._purpose].about}")
        if chosen.kv_blocks < limits.kv_blocks:
            whys.append("kv_blocks holds the hard line of memory")
        if chosen.watermark_blocks:
            whys.append("admission keeps what is in use below the watermark")
        if trouble := tuner.space.unreachable():
            log.warning("memory: %s", trouble)
        return chosen.within(resolved), "; ".join(whys) or "as resolved"

    async def run(self) -> None:
        """One round every control period, for ever."""
        while self._on:
            await asyncio.sleep(self._period_s)
            try:
                await self._round()
            except InferdError as error:  # the engine went away, or refuses: the next round sees what is
                log.warning("the tuner could not change a limit: %s", error)
            except Exception:
                log.exception("the tuner failed and is frozen; serving goes on")
                if self._tuner is not None:
                    self._tuner.freeze()

    async def _round(self) -> None:
        view, tuner = self._port.view(), self._tuner
        if view.state != "ready" or view.limits is None or tuner is None:
            self._before = None
            return
        before, now = self._before, self._look(max(1, round(self._period_s)))
        self._before = now
        if before is None:
            return
        window = window_between(before, now, self._targets)
        wanted = tuner.steer(window, view.limits, time.monotonic())
        self._tell_missed(tuner.missed.now)
        changed = {n: v for n, v in asdict(wanted).items() if v != getattr(view.limits, n)}
        if changed:
            try:
                await self._arbiter.propose(changed, "tuner", self._why)
            except InferdError:
                tuner.abandon()
                raise
        due = time.monotonic() - self._saved_s > _SAVE_S and not window.idle
        if due or tuner.settled_changes != self._saved_changes:
            await asyncio.to_thread(self._memory_put)

    def _tell_missed(self, missed: dict[str, str]) -> None:
        """Publish which targets are missed, when it is others than before."""
        if missed.keys() != self._missed.keys():
            self._publish(TargetsMissed(at_ns=time.monotonic_ns(), missed=dict(missed)))
            for name in missed.keys() - self._missed.keys():
                log.warning("tuner: the target %s is missed: %s", name, missed[name])
        self._missed = dict(missed)

    def _decided(self, decision: Decision) -> None:
        self._why = f"{decision.rule}: {decision.why}"
        log.info(
            "tuner: %s %s %d → %d%s (%s)", decision.rule, decision.knob, decision.before, decision.after,
            f", {decision.verdict}" if decision.verdict else "", decision.why,
        )  # fmt: skip
        self._publish(msgspec.structs.replace(decision, at_ns=time.monotonic_ns()))

    def close(self) -> None:
        """The orderly end: what was learned is kept."""
        if self._tuner is not None:
            self._memory_put()

    def _memory_put(self) -> None:
        tuner = self._tuner
        if tuner is None or not tuner.has_learned:
            return
        self._saved_s, self._saved_changes = time.monotonic(), tuner.settled_changes
        try:
            self._memory.put(self._key, tuner.learned())
        except OSError as error:
            log.warning("what the tuner learned cannot be kept in %s: %s", self._memory.path, error.strerror or error)

    # -- what people ask

    def status(self) -> dict[str, Any]:
        tuner = self._tuner
        if not self._on:
            return {"state": "off", "why": "the setting `tuner` is false", "changes": self._arbiter.reasons}
        if tuner is None:
            return {"state": "waiting", "why": "no engine is ready"}
        view = self._port.view()
        bounds = {name: tuner.space.bounds(name) for name in KNOBS}
        return {
            **tuner.status(),
            "limits": {
                name: {
                    "value": getattr(view.limits, name) if view.limits else None,
                    "least": low,
                    "most": high,
                    "live": KNOBS[name].live,
                    "about": KNOBS[name].about,
                    **self._arbiter.reasons.get(name, {}),
                }
                for name, (low, high) in bounds.items()
            },
        }

    async def act(self, order: "TunerOrder") -> dict[str, Any]:
        """Freeze, release, pin, or set (which also pins). Raises ConfigError."""
        set_to, pin, freeze, release = order.set_to, order.pin, order.freeze, order.release
        tuner = self._tuner
        if (freeze or release or pin) and (not self._on or tuner is None):
            raise ConfigError("there is no tuner to steer", "it is off, or no engine is ready; `set` works without it")
        for name in pin:
            if name not in KNOBS:
                raise ConfigError(f"no such limit: {name}", f"one of {', '.join(KNOBS)}")
        if set_to:
            await self._arbiter.propose(set_to, "api", order.why or "asked for over the control API")
        if tuner is not None:
            if release:
                tuner.release()
            if freeze:
                tuner.freeze()
            if pin or set_to:
                tuner.pin([*pin, *set_to])
            await asyncio.to_thread(self._memory_put)
        limits = self._port.view().limits
        if limits is None:
            raise EngineFault("no engine is ready")
        return {"limits": asdict(limits), "tuner": self.status()}
