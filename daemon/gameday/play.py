"""Game day: each drill on a scratch daemon, and of each whether the instruments did what they are for: the metric
moved, the alert would fire, the doctor named the cause first, and the runbook's remedy made the finding go.

Owns the order of a drill and its verdict. What a drill is and what it must raise is in daemon/drills.py. Rules run
`PACE` times as fast as under Prometheus, so that a window of half an hour is a minute. Enter at `play`.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from daemon import remedies
from daemon.drills import DRILLS, Drill
from daemon.gameday import rules
from daemon.gameday.scratch import Scratch
from engine.errors import InferdError
from runbooks import check, gather
from runbooks.evidence import Targets
from telemetry.client import ClientError
from telemetry.events import Finding

PACE: Final = 30.0
_EVERY_SECONDS: Final = 0.5
_PATIENCE_SECONDS: Final = 90.0
_PROOF_SECONDS: Final = 40.0
_PROOF_LOOKS: Final = 3  # without the finding, one after the other
_DEADLINE_SECONDS: Final = 20  # of progress; a wedge is alerted at 30 s, ended at 40 s
# A game day may run on a machine that does other work too: that it is slow is no finding of a drill.
_TARGETS: Final = Targets(ttft_seconds=1e9, inter_token_seconds=1e9, loop_lag_seconds=1e9)
_AMOUNTS: Final = {"wedge": 36_000, "full_disk": 16_000, "slow_client": 25_000}  # ms that they last
_SILENT: Final = ("slow_client",)  # one of them is no alarm: its alert needs a cache full of them

# What the runbook says to do, as `inferd doctor do` has it; or in words, what is done to the world around.
_CHUNKS: Final = "do set prefill_chunk=64 max_num_batched_tokens=128"
_RESTART: Final = "do restart-engine"
_BY_ITSELF: Final = "(the daemon starts the engine again)"
REMEDIES: Final[Mapping[str, str]] = {
    "capacity": "do set max_num_seqs=4",
    "spike": _CHUNKS,
    "logits": _CHUNKS,
    "address_space": _CHUNKS,
    "fragmentation": _RESTART,
    "kv": "do set kv_blocks=64",
    "neighbour": "(the neighbour is ended)",
    "leak": _RESTART,
    "wedge": _RESTART,
    "wedge_for_good": _RESTART,
    "kill_engine": _BY_ITSELF,
    "kill_both": "(inferd is started again)",
    "slow_client": "do abort REQUEST_ID",
    "full_disk": "(room is made)",
    "collector_down": "(inferd is started again without the dead endpoint)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one drill. `alert` is None where none is due; `first` is what the doctor said first, at last."""

    drill: str
    metric: str
    moved: bool = False
    alert: str = ""
    fired: bool | None = None
    finding: str = ""
    made: bool = False
    first: str = ""
    remedy: str = ""
    works: bool = False
    seconds: float = 0.0
    error: str = ""

    @property
    def good(self) -> bool:
        """Everything happened that should."""
        return self.moved and self.fired is not False and self.made and self.works and not self.error


@dataclass(slots=True)
class _Stage:
    """One drill on its daemon, while it lasts."""

    name: str
    drill: Drill
    scratch: Scratch
    watch: rules.Watch
    began: float = field(default_factory=time.monotonic)
    before: float = math.nan
    incidents: int = 0

    def scrape(self) -> None:
        """One scrape into the tape; of a daemon that does not answer, that it did not."""
        try:
            samples = rules.scraped(self.scratch.client.get("/metrics").decode())
        except ClientError:
            samples = {}
        self.watch.tape.add(time.monotonic(), {**samples, **rules.up(bool(samples))})

    def metric(self) -> float:
        """Of the newest scrape; 0 for a series that has none yet."""
        newest = {labels: points[-1][1] for labels, points in self.watch.tape.series.items()}
        value = rules.total(newest, self.drill.metric)
        return 0.0 if math.isnan(value) else value

    def findings(self, since: float) -> list[Finding] | None:
        """What the doctor says, looking at nothing older; None while the daemon does not answer."""
        try:
            seen = gather.live(self.scratch.client, _TARGETS)
        except ClientError:
            return None
        return check.examine(seen.within(time.monotonic() - since))


def play(names: Sequence[str], model: str, directory: Path, say: Callable[[str], None]) -> list[Verdict]:
    """Each drill on a daemon of its own, one after the other. `say` hears what is going on."""
    alerts = rules.read()
    verdicts = []
    for number, name in enumerate(names, 1):
        drill = DRILLS[name]
        say(f"{number}/{len(names)} {name}: {drill.text}")
        began = time.monotonic()
        scratch = Scratch(
            directory / name, model, [name], INFERD_PROGRESS_DEADLINE=str(_DEADLINE_SECONDS)
        )  # fmt: skip
        verdict = Verdict(
            drill=name, metric=drill.metric, alert="" if name in _SILENT else drill.alert,
            finding=f"{drill.runbook} {drill.section}", remedy=REMEDIES[name],
        )  # fmt: skip
        try:
            watch = rules.Watch({drill.alert: alerts[drill.alert]}, PACE)
            verdict = _one(verdict, _Stage(name, drill, scratch, watch), say)
        except (InferdError, ClientError) as error:
            verdict = replace(verdict, error=str(error))
        finally:
            scratch.stop()
        verdicts.append(replace(verdict, seconds=round(time.monotonic() - began, 1)))
    return verdicts


def _one(verdict: Verdict, stage: _Stage, say: Callable[[str], None]) -> Verdict:
    stage.scratch.start()
    with stage.scratch.busy():
        _until(lambda: stage.scratch.answered >= 10, _PATIENCE_SECONDS)
        stage.scrape()
        stage.before = 0.0 if stage.name == "collector_down" else stage.metric()  # that one is there from the start
        stage.began = time.monotonic()
        _plant(stage)
        verdict = _watched(verdict, stage)
        say(f"    first finding: {verdict.first or 'none'}; remedy: {verdict.remedy}")
        since = _remedy(stage)
        return replace(verdict, works=_proved(stage, since))


def _plant(stage: _Stage) -> None:
    """A daemon that is killed by it does not answer."""
    with contextlib.suppress(ClientError):
        stage.scratch.client.post(f"/inferd/v1/drill/{stage.name}", {"amount": _AMOUNTS.get(stage.name, 0)})


def _watched(verdict: Verdict, stage: _Stage) -> Verdict:
    """Until all is seen that must be, or patience ends. An out-of-memory is planted again: its alert is for two."""
    end = time.monotonic() + _PATIENCE_SECONDS
    fired = None if stage.name in _SILENT else False
    while time.monotonic() < end:
        stage.scrape()
        firing = stage.watch.look(time.monotonic())
        if fired is False:
            fired = stage.drill.alert in firing
        if not stage.scratch.alive:
            if fired:
                stage.scratch.start()  # who was killed is explained by the next life
        else:
            value = stage.metric()
            moved = verdict.moved or value > stage.before
            if stage.drill.kind == "oom" and int(value - stage.before) > stage.incidents and not fired:
                stage.incidents = int(value - stage.before)
                _plant(stage)
            found = stage.findings(stage.began)
            verdict = replace(verdict, moved=moved, fired=fired)
            if found:
                places = f"{found[0].runbook} {found[0].section}"
                verdict = replace(verdict, first=places, made=found[0].runbook == stage.drill.runbook)
            if verdict.moved and verdict.fired is not False and verdict.made:
                break
        time.sleep(_EVERY_SECONDS)
    return replace(verdict, fired=fired)


def _remedy(stage: _Stage) -> float:
    """Do it. Returns when that was; what happened before it is no longer looked at."""
    words = REMEDIES[stage.name].split()
    if words[0] == "do":
        given = [_stalled(stage) if word == "REQUEST_ID" else word for word in words[2:]]
        with contextlib.suppress(InferdError):  # an engine that is already gone need not be ended
            remedies.act(stage.scratch.client, words[1], given)
    elif stage.name == "collector_down":
        stage.scratch.stop()
        stage.scratch.drills = ()
        stage.scratch.start()
    elif stage.name in ("neighbour",):
        stage.scratch.client.post("/inferd/v1/drill/none", {})
    elif stage.name == "full_disk":
        lasts = _AMOUNTS[stage.name] / 1000
        time.sleep(max(0.0, stage.began + lasts + 1 - time.monotonic()))
    return time.monotonic()


def _stalled(stage: _Stage) -> str:
    """The request whose client does not read: it is the oldest."""
    live = stage.scratch.client.snapshot(["requests"]).requests
    waiting = sorted((each for each in (live.live if live else None) or ()), key=lambda each: each.received_ns or 0)
    if not waiting:
        raise InferdError("no request is running", "the client has gone by itself")
    return waiting[0].request_id


def _proved(stage: _Stage, since: float) -> bool:
    """Requests are answered and the doctor looks several times at what came after, without that finding."""
    answered, well = stage.scratch.answered, 0
    end = time.monotonic() + _PROOF_SECONDS
    while time.monotonic() < end:
        time.sleep(1.0)
        found = stage.findings(since) if stage.scratch.ready() else None
        well = well + 1 if found is not None and all(f.runbook != stage.drill.runbook for f in found) else 0
        if well >= _PROOF_LOOKS and stage.scratch.answered > answered:
            return True
    return False


def _until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
