"""Healthy mixed load for half an hour, and what the daemon's own rounds find meanwhile: on a well machine that does
nothing else, nothing should be found."""

import time
from dataclasses import asdict, dataclass

from telemetry.client import Client, Endpoint
from telemetry.events import Finding
from tests.fakes.tiny_served import Load
from tests.perf.harness import Findings
from tests.perf.served import serving

TITLE = "false findings of the doctor under healthy mixed load"
PROMISE = "≤ 1 warning or worse in 30 minutes"
_SECONDS, _QUICK_SECONDS = 1800.0, 15.0
_EVERY_SECONDS = 2.0
_MODEL = "tiny"  # the name that tests/fakes/tiny_served.py asks for


@dataclass(frozen=True, slots=True)
class Seen:
    """A finding as it was first seen."""

    at_s: float
    runbook: str
    severity: str
    section: str
    summary: str


def _watched(client: Client, seconds: float) -> list[Seen]:
    """Every finding that the daemon holds in that time, once for each place it leads to."""
    seen: dict[tuple[str, str, str], Seen] = {}
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        for each in client.snapshot(["findings"]).findings or []:
            if isinstance(each, Finding):
                key = (each.runbook, each.severity, each.section)
                at_s = round(time.monotonic() - began, 1)
                seen.setdefault(key, Seen(at_s, each.runbook, each.severity, each.section, each.summary))
        time.sleep(_EVERY_SECONDS)
    return list(seen.values())


def run(quick: bool) -> Findings:
    """Short and long prompts, short and long answers, and pauses between; well within what the machine can bear."""
    seconds = _QUICK_SECONDS if quick else _SECONDS
    with serving("--served-model-name", _MODEL, "--max-num-seqs", "8") as served:
        with (
            Load(served, clients=1, prompt="Name three rivers.", tokens=30) as short,
            Load(served, clients=1, prompt="The river is long and the night is cold. " * 12, tokens=60) as long,
        ):
            seen = _watched(Client(Endpoint(socket=served.runtime / "control.sock")), seconds)
        answered = short.answered + long.answered
    false = [each for each in seen if each.severity != "info"]
    return Findings(
        runs=[asdict(each) for each in seen],
        summary={
            "seconds": round(seconds),
            "requests_answered": answered,
            "false_findings": len(false),
            "remarks": len(seen) - len(false),
        },
        met=len(false) <= 1 and answered > 0,
        notes=[f"{each.runbook} {each.section}: {each.summary}" for each in seen],
    )
