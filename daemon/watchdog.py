"""Watchdog: tells an engine that is slow from one that is stuck, and says with whose stacks.

Owns the two deadlines. An engine that has not moved for one deadline is an incident: readiness is false by then
(daemon/lifecycle.py). After two it is ended, so that it can be started again. Moving is what the pulse says, so a slow
step that ticks at each layer is never stuck, and neither is an idle engine. It must not know how an engine is ended or
started. Enter at `Watchdog.look`, often.

Time counts only while we look: if this machine or this process was suspended, the engine was too, perhaps, and has a
whole deadline from then on.
"""

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

from engine.pulse import Beat
from telemetry.events import Event, Incident
from telemetry.evidence import ProcessEnd
from telemetry.forensics import judge_end

log = logging.getLogger("inferd.watchdog")

PERIOD_S = 0.2
_MOST_LOOK_NS = 1_000_000_000  # of one look's time that counts
_STACKS_S = 1.0  # for the engine to write its stacks
_MOST_STACK_BYTES = 32 << 10
DUMP_SIGNAL = signal.SIGUSR1


class Watched(Protocol):
    """The engine of now, as far as a watchdog needs it."""

    @property
    def engine_id(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    def beat(self) -> Beat: ...

    def read_stacks(self) -> str: ...


class Watchdog:
    """`victims()` are the choices that run."""

    def __init__(
        self,
        deadline_s: float,
        publish: Callable[[Event], None],
        victims: Callable[[], Sequence[str]],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._deadline_ns = int(deadline_s * 1e9)
        self._publish = publish
        self._victims = victims
        self._clock = clock
        self._engine_id = ""
        self._ticks = -1
        self._looked_ns = 0
        self._stuck_ns = 0
        self._raised = self._ended = False

    def look(self, engine: Watched | None) -> Literal["", "report", "end"]:
        """What is to be done now about `engine`, the one that serves (None while there is none)."""
        now_ns = self._clock()
        since_ns, self._looked_ns = now_ns - self._looked_ns, now_ns
        if engine is None:
            self._engine_id = ""
            return ""
        beat = engine.beat()
        if engine.engine_id != self._engine_id or beat.ticks != self._ticks:
            if self._raised and engine.engine_id == self._engine_id:
                log.warning("the engine moves again after %.1f s", self._stuck_ns / 1e9)
            self._engine_id, self._ticks = engine.engine_id, beat.ticks
            self._stuck_ns, self._raised, self._ended = 0, False, False
            return ""
        self._stuck_ns += min(since_ns, _MOST_LOOK_NS)
        if self._stuck_ns >= self._deadline_ns and not self._raised:
            self._raised = True
            return "report"
        if self._stuck_ns >= 2 * self._deadline_ns and not self._ended:
            self._ended = True
            log.error("the engine is ended: no progress for %.1f s in %s", self._stuck_ns / 1e9, beat.phase)
            return "end"
        return ""

    def report(self, engine: Watched) -> None:
        """Publish the incident. Waits up to a second for the engine's stacks: not to be called on a loop."""
        beat = engine.beat()
        end = ProcessEnd(process="engine", stuck_ms=self._stuck_ns // 1_000_000, phase=beat.phase)
        verdict = judge_end(end)
        at_ns = self._clock()
        log.error("%s (step %d)", verdict.summary, beat.step)
        incident = Incident(
            at_ns=at_ns,
            incident_id=f"wedged-{at_ns}",
            kind="wedged",
            cause="wedged",
            summary=f"{verdict.summary} of step {beat.step}",
            engine_id=engine.engine_id,
            request_ids=tuple(self._victims()),
            clues=verdict.clues,
            knobs=verdict.knobs,
            end=end,
            stacks={"engine": engine_stacks(engine), "daemon": own_stacks()},
        )
        self._publish(incident)


def own_stacks() -> str:
    """Every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)[:_MOST_STACK_BYTES]


def engine_stacks(engine: Watched) -> str:
    """Every thread of the engine, written by its own signal handler, which needs neither its main thread nor its
    interpreter; before that what the kernel says of the threads. A stopped process writes nothing."""
    if engine.pid is None:
        return "the engine has no process"
    kernel = _kernel_states(engine.pid)
    before = len(engine.read_stacks())
    try:
        os.kill(engine.pid, DUMP_SIGNAL)
    except ProcessLookupError:
        return f"{kernel}\nthe process is gone"
    end = time.monotonic() + _STACKS_S
    text = ""
    while time.monotonic() < end:
        fresh = engine.read_stacks()[before:]
        if fresh and fresh == text:  # nothing was added meanwhile: it is complete
            break
        text = fresh
        time.sleep(0.02)
    return f"{kernel}\n{text or 'it wrote no stacks within a second'}"[:_MOST_STACK_BYTES]


def _kernel_states(pid: int) -> str:
    """Name, state and place in the kernel of each thread."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        try:
            name = (task / "comm").read_text(encoding="utf-8", errors="replace").strip()
            state = (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
            place = (task / "wchan").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:  # it ended, or it is not ours to see
            continue
        lines.append(f"kernel: {task.name} {name}: state {state}, in {place or '?'}")
    return "\n".join(lines)
