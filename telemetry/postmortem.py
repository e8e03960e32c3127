"""Post-mortem: from an incident to its bundle, and from the rings of a dead life to the incident that nobody reported.

Owns what a bundle is filled with: the fold's state, the ladders of the last minute, the last steps from the engine's
ring. It judges nothing itself (forensics.py) and owns no format (bundle.py). Enter at `Casebook.take`, a sink of the
bus, and at `previous_life`, before new rings take the place of the old ones.

A disk that fails raises out of `take`, so that the bus counts the loss; it never makes an incident of its own.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from telemetry import events
from telemetry.bundle import Folder
from telemetry.bus import Undelivered
from telemetry.casefile import Bundle, Involved, Rungs
from telemetry.evidence import ProcessEnd, Reading
from telemetry.fold import Fold
from telemetry.forensics import judge_end
from telemetry.ladder import ladder
from telemetry.recorder import Recording, previous, read_ring
from telemetry.state import State

_STEPS: Final = 64
_LADDERS: Final = 60  # about a minute: one with each heartbeat
_OUTCOME_NS: Final = 2_000_000_000  # after a fault, until a sign of life means that it is over
_OPEN: Final = 16  # bundles that may still be told their outcome
_SAME_S: Final = 1.0  # incidents of one kind and cause that come faster share a bundle
_DECISIONS: Final = 8
_MOST_INVOLVED: Final = 64


class Casebook:
    """Writes a bundle for each incident, and adds to it what comes of it. `settle` waits for the fold."""

    wants: tuple[type[events.Event], ...] = (events.EngineStatus, events.Incident, events.EngineEnded)

    def __init__(
        self,
        folder: Folder,
        fold: Fold,
        engine_ring: Path,
        versions: dict[str, str],
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self.folder = folder
        self._fold = fold
        self._engine_ring = engine_ring
        self._versions = versions
        self._settle = settle
        self._ladders: deque[Rungs] = deque(maxlen=_LADDERS)
        self._open: OrderedDict[str, Bundle] = OrderedDict()
        self._newest: dict[tuple[str, str], tuple[int, Path]] = {}
        self._found: dict[str, Bundle] = {}

    def place(self, incident: events.Incident) -> Path:
        """Where its bundle will lie; asked once, before it is taken. In a burst of one kind and cause: the first's.
        A step that fails again and again must not keep the disk busy."""
        key, own = (incident.kind, incident.cause), self.folder.file(incident.incident_id)
        newest_ns, newest = self._newest.get(key, (None, own))
        if newest_ns is not None and incident.at_ns - newest_ns < _SAME_S * 1e9:
            return newest
        self._newest[key] = incident.at_ns, own
        return own

    def take(self, batch: Sequence[events.Event]) -> None:
        """Raises Undelivered with the number of bundles that could not be written."""
        lost, why = 0, ""
        for event in batch:
            try:
                if isinstance(event, events.EngineStatus):
                    self._remember_ladder(event.at_ns)
                    self._on_sign_of_life(event)
                elif isinstance(event, events.Incident):
                    self._on_incident(event)
                elif isinstance(event, events.EngineEnded):
                    self._on_end(event)
            except OSError as error:
                lost, why = lost + 1, str(error)
        if lost:
            raise Undelivered(lost, f"{lost} bundle(s) could not be written: {why}")

    def keep(self, life: "PreviousLife") -> None:
        """The bundle of the life before, to be written when its incident comes by."""
        self._found[life.incident.incident_id] = life.bundle

    def sizes(self) -> dict[str, int]:
        return {"casebook_open": len(self._open), "casebook_ladders": len(self._ladders)}

    def _remember_ladder(self, at_ns: int) -> None:
        with self._fold.reading() as state:
            rungs = _rungs(state, at_ns)
        if rungs is not None:
            self._ladders.append(rungs)

    def _on_incident(self, incident: events.Incident) -> None:
        found = self._found.pop(incident.incident_id, None)
        if found is not None:
            self.folder.write(found)
            return
        if incident.bundle and Path(incident.bundle).stem != incident.incident_id:
            return
        self._settle()
        steps = last_steps(self._engine_ring, incident.engine_id)
        with self._fold.reading() as state:
            bundle = self._bundle(incident, state, steps)
        if incident.kind in ("oom", "wedged"):  # the others are over
            self._open[incident.incident_id] = bundle
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        self.folder.write(bundle)

    def _bundle(self, incident: events.Incident, state: State, steps: Sequence[events.StepReport]) -> Bundle:
        before = [rungs for rungs in self._ladders if rungs.at_ns < incident.at_ns]
        notes = [] if steps else ["the last steps are the daemon's: the engine's ring could not be read"]
        started = state.started
        return Bundle(
            **_facts(incident),
            unix_seconds=time.time() - (time.monotonic_ns() - incident.at_ns) / 1e9,
            model=state.model,
            requests=_involved(incident, state),
            ladder_before=before[-1] if before else None,
            ladder_at=_rungs(state, incident.at_ns) or (self._ladders[-1] if self._ladders else None),
            steps=tuple(steps or list(state.steps)[-_STEPS:]),
            limits=state.limits,
            resolved={**started.resolved, "reasons": started.reasons} if started else {},
            decisions=tuple(list(state.decisions)[-_DECISIONS:]),
            versions=self._versions,
            notes=tuple(notes),
        )

    def _on_sign_of_life(self, status: events.EngineStatus) -> None:
        """Tell the bundles that the engine goes on."""
        for name, bundle in list(self._open.items()):
            if status.at_ns - bundle.at_ns < _OUTCOME_NS:
                continue
            del self._open[name]
            with self._fold.reading() as state:
                outcome = _survived(bundle, state)
            self.folder.write(msgspec.structs.replace(bundle, outcome=outcome))

    def _on_end(self, end: events.EngineEnded) -> None:
        """Tell the bundles of this engine what came of it."""
        for name, bundle in list(self._open.items()):
            if bundle.engine_id != end.engine_id:
                continue
            del self._open[name]
            victims = tuple(
                Involved(request_id=victim, part="victim", reason="error", error="engine_died")
                for victim in end.victims[:_MOST_INVOLVED]
            )
            known = {victim.request_id for victim in victims}
            others = tuple(each for each in bundle.requests if each.request_id not in known or each.part == "suspect")
            outcome = f"the engine ended ({end.cause}: {end.detail}); {len(end.victims)} running choices were cut off"
            self.folder.write(msgspec.structs.replace(bundle, requests=(*others, *victims), outcome=outcome))


def _survived(bundle: Bundle, state: State) -> str:
    """An engine that says something after a fault has survived it."""
    if bundle.kind == "wedged":
        return "the engine moved again by itself, and no request was lost"
    failed = [
        each.request_id
        for each in bundle.requests
        if (record := state.records.get(each.request_id)) and record.error == "out_of_memory"
    ]
    if failed:
        return f"the engine dropped the step and goes on; {', '.join(failed)} failed, with the error out_of_memory"
    return "the engine dropped the step, computed it again with less at once, and goes on; no request failed by it"


def _facts(incident: events.Incident) -> dict[str, Any]:
    """The fields that an incident and its bundle have in common."""
    names = (
        "incident_id",
        "kind",
        "cause",
        "summary",
        "at_ns",
        "engine_id",
        "clues",
        "knobs",
        "memory",
        "end",
        "stacks",
    )
    return {name: getattr(incident, name) for name in names}


def _involved(incident: events.Incident, state: State) -> tuple[Involved, ...]:
    """Suspects first, then who ran beside them."""
    views = {view.request_id: view for view in incident.requests}
    found = []
    for name in dict.fromkeys((*incident.request_ids, *views)):
        view, record = views.get(name), state.records.get(name)
        part = "suspect" if name in incident.request_ids else "running"
        if incident.end is not None and name in incident.request_ids:
            part = "victim"
        found.append(
            Involved(
                request_id=name,
                part=part,
                prompt_tokens=view.prompt_tokens if view else record.prompt_tokens if record else None,
                output_tokens=view.output_tokens if view else record.output_tokens if record else None,
                reason=record.reason if record else "",
                error=record.error if record else "",
            )
        )
    return tuple(found[:_MOST_INVOLVED])


def _rungs(state: State, at_ns: int) -> Rungs | None:
    known = ladder(state)
    if known is None:
        return None
    return Rungs(
        at_ns=at_ns, device=known.device, source=known.source, owners=dict(known.owners), limit_bytes=known.limit_bytes
    )


def last_steps(ring: Path, engine_id: str, most: int = _STEPS) -> list[events.StepReport]:
    """The last steps that an engine wrote down itself, oldest first; empty if its ring is not there any more."""
    for path in (ring, previous(ring)):
        recording = _recording(path)
        if recording is not None and recording.label == engine_id:
            return _newest(_decoded(recording.records[-8 * most :]), events.StepReport, most)
    return []


def _recording(path: Path) -> Recording | None:
    try:
        return read_ring(path)
    except (OSError, ValueError):
        return None


def _decoded(records: Iterable[tuple[int, bytes]]) -> list[events.Event]:
    """Those of another version of inferd may not be readable: they are left out."""
    found = []
    for _, payload in records:
        try:
            found.append(events.decode(payload))
        except msgspec.DecodeError:
            continue
    return found


def _newest(found: Iterable[events.Event], kind: type[Any], most: int) -> list[Any]:
    return [event for event in found if isinstance(event, kind)][-most:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a daemon leaves in its ring's header about the machine it lived on."""

    oom_kills: int | None = None
    boot_id: str = ""
    versions: dict[str, str] | None = None

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousLife:
    """What the rings say about a life that ended without a word."""

    incident: events.Incident
    bundle: Bundle


def previous_life(daemon_ring: Path, engine_ring: Path, now: Note) -> PreviousLife | None:
    """The post-mortem of the life before, to be called before its rings are replaced; None if that life ended in order,
    or there was none. `now` is the machine as it is."""
    daemon = _recording(daemon_ring)
    if daemon is None or daemon.clean or not daemon.records:
        return None
    told = _decoded(daemon.records)
    started = _newest(told, events.EngineStarted, 1)
    engine = _recording(engine_ring)
    if engine is not None and not _of_that_life(engine, daemon, started):
        engine = None
    heard = _decoded(engine.records) if engine else []
    end, notes = _how_it_ended(daemon, engine, told, now)
    verdict = judge_end(end, _last_reading(told, started))
    at_ns = max((event.at_ns for event in (*told[-4:], *heard[-4:])), default=daemon.started_ns)
    running = _unfinished(heard)
    status = _newest(told, events.EngineStatus, 1)
    incident = events.Incident(
        at_ns=at_ns,
        incident_id=f"{verdict.cause}-{daemon.started_unix_ns // 1_000_000}-{daemon.pid}",
        kind=verdict.cause,
        cause="host_cgroup" if verdict.cause == "oom_killed" else verdict.cause,
        summary=f"the previous life: {verdict.summary}",
        engine_id=engine.label if engine else "",
        request_ids=running,
        clues=verdict.clues,
        knobs=verdict.knobs,
        end=end,
    )
    bundle = Bundle(
        **_facts(incident),
        unix_seconds=daemon.started_unix_ns / 1e9 + (at_ns - daemon.started_ns) / 1e9,
        outcome=f"{len(running)} running choices were cut off; their clients saw the connection break",
        model=started[0].resolved.get("model", "") if started else "",
        previous_life=True,
        requests=tuple(Involved(request_id=name, part="victim") for name in running[:_MOST_INVOLVED]),
        steps=tuple(_newest(heard or told, events.StepReport, _STEPS)),
        limits=started[0].limits if started else status[0].limits if status else None,
        resolved={**started[0].resolved, "reasons": started[0].reasons} if started else {},
        ladder_at=_replayed(told),
        decisions=tuple(_newest(told, events.Decision, _DECISIONS)),
        versions=_note(daemon).versions or {},
        notes=notes,
    )
    return PreviousLife(incident=incident, bundle=bundle)


def _of_that_life(engine: Recording, daemon: Recording, started: list[events.EngineStarted]) -> bool:
    """Whether that daemon had this engine. A ring keeps its last minutes: of a long life the start is not there."""
    if started:
        return engine.label == started[0].engine_id
    return engine.started_unix_ns >= daemon.started_unix_ns


def _how_it_ended(
    daemon: Recording, engine: Recording | None, told: list[events.Event], now: Note
) -> tuple[ProcessEnd, tuple[str, ...]]:
    before, notes = _note(daemon), []
    both = engine is not None and not engine.clean
    moved = None
    if before.boot_id and now.boot_id and before.boot_id != now.boot_id:
        notes.append("the machine was started again since: it may have gone down with inferd")
    elif before.oom_kills is not None and now.oom_kills is not None:
        moved = max(0, now.oom_kills - before.oom_kills)
    else:
        notes.append("no control group counts kills for memory here, so such a kill cannot be told from another")
    last = _newest(told, events.StateChanged, 1)
    crashed = bool(last) and last[0].state == "stopped"
    lines = (last[0].why,) if crashed else ()
    name = "both" if both else "daemon"
    return ProcessEnd(process=name, exit_code=1 if crashed else None, oom_kills=moved, last_lines=lines), tuple(notes)


def _note(recording: Recording) -> Note:
    try:
        return msgspec.json.decode(recording.note, type=Note)
    except msgspec.DecodeError:
        return Note()


def _last_reading(told: list[events.Event], started: list[events.EngineStarted]) -> Reading | None:
    status = _newest(told, events.EngineStatus, 1)
    limit = started[0].resolved.get("memory_limit_bytes") if started else None
    if not status or not limit:
        return None
    return Reading(
        at_ns=status[0].at_ns, scope="process", limit_bytes=limit, free_bytes=max(0, limit - status[0].rss_bytes)
    )


def _unfinished(heard: list[events.Event]) -> tuple[str, ...]:
    """Requests that got a row and no end, as far back as the ring goes."""
    running: dict[str, None] = {}
    for event in heard:
        if isinstance(event, events.StepReport):
            running |= {name: None for _, name in event.admitted}
            for name in event.finished:
                running.pop(name, None)
    return tuple(running)


def _replayed(told: list[events.Event]) -> Rungs | None:
    """The ladder as the dead daemon's fold had it last."""
    fold = Fold("")
    kinds = (events.EngineStarted, events.EngineStatus, events.MemoryReport, events.StepReport, events.EngineEnded)
    kept = [event for event in told if isinstance(event, kinds)]
    fold.take(kept)
    with fold.reading() as state:
        return _rungs(state, kept[-1].at_ns if kept else 0)
