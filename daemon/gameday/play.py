"""Game day: each drill on a scratch daemon, and of each whether the instruments did what they are for: the metric
moved, the alert would fire, the doctor named the cause first, and the runbook's remedy is one.

Owns the order of a drill and its verdict. What a drill is and what it must raise is in daemon/drills.py. Rules run
`PACE` times as fast as under Prometheus, so that a window of half an hour is a minute. Enter at `play`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from daemon.drills import DRILLS
from daemon.gameday import proof, rules
from daemon.gameday.proof import REMEDIES
from daemon.gameday.scratch import Scratch
from daemon.gameday.stage import Stage
from engine.errors import InferdError
from telemetry.client import ClientError

PACE: Final = 30.0
_EVERY_SECONDS: Final = 0.5
_PATIENCE_SECONDS: Final = 120.0
_DEADLINE_SECONDS: Final = 20  # of progress; a wedge is alerted at 30 s, ended at 40 s
# Where the doctor leads while it lasts, if that is elsewhere than after it.
_WHILE: Final[Mapping[str, str]] = {"wedge": "restart", "wedge_for_good": "restart"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one drill. `first` is what the doctor said first, at last; `doubt` is what the remedy's proof lacks."""

    drill: str
    metric: str
    moved: bool = False
    alert: str = ""
    fired: bool = False
    finding: str = ""
    made: bool = False
    first: str = ""
    remedy: str = ""
    works: bool = False
    doubt: str = ""
    seconds: float = 0.0
    error: str = ""

    @property
    def good(self) -> bool:
        """Everything happened that should."""
        return self.moved and self.fired and self.made and self.works and not self.error


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
            drill=name, metric=drill.metric, alert=drill.alert,
            finding=f"{drill.runbook} {_WHILE.get(name, drill.section)}", remedy=REMEDIES[name].words,
        )  # fmt: skip
        try:
            watch = rules.Watch({drill.alert: alerts[drill.alert]}, PACE)
            verdict = _one(verdict, Stage(name, drill, scratch, watch), say)
        except (InferdError, ClientError) as error:
            verdict = replace(verdict, error=str(error))
        finally:
            scratch.stop()
        verdicts.append(replace(verdict, seconds=round(time.monotonic() - began, 1)))
    return verdicts


def _one(verdict: Verdict, stage: Stage, say: Callable[[str], None]) -> Verdict:
    stage.scratch.start()
    with stage.scratch.busy():
        _until(lambda: stage.scratch.answered >= 10, _PATIENCE_SECONDS)
        stage.prepare()
        stage.scrape()
        stage.before = 0.0 if stage.name == "collector_down" else stage.metric()  # that one is there from the start
        stage.began = time.monotonic()
        stage.plant()
        verdict = _watched(verdict, stage)
        say(f"    first finding: {verdict.first or 'none'}; remedy: {verdict.remedy}")
        doubt = proof.proved(stage, proof.apply(stage))
        return replace(verdict, works=not doubt, doubt=doubt)


def _watched(verdict: Verdict, stage: Stage) -> Verdict:
    """Until all is seen that must be, or patience ends. An out-of-memory is planted again: its alert is for two."""
    end = time.monotonic() + _PATIENCE_SECONDS
    planted = 1
    while time.monotonic() < end and not (verdict.moved and verdict.fired and verdict.made):
        stage.scrape()
        fired = verdict.fired or stage.drill.alert in stage.watch.look(time.monotonic())
        verdict = replace(verdict, fired=fired)
        if stage.scratch.alive:
            risen = stage.metric() - stage.before
            verdict = replace(verdict, moved=verdict.moved or risen > 0)
            if stage.drill.kind == "oom" and risen >= planted and not fired:
                planted = int(risen) + 1
                stage.plant()
            found = stage.findings(stage.began)
            if found:
                first = f"{found[0].runbook} {found[0].section}"
                verdict = replace(verdict, first=first, made=first == verdict.finding)
        elif fired:
            stage.scratch.start()  # who was killed is explained by the next life
        time.sleep(_EVERY_SECONDS)
    return verdict


def _until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
