"""Remedies on game day: what the runbook says to do about each drill, and the proof that it did something.

Owns the table and the proof: an out-of-memory whose remedy is a limit is planted once more, with the same bytes, and
must not come; the drill's metric must stand still, or be back at nothing; and requests are answered. Enter at `apply`,
then `proved`.
"""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from daemon import remedies
from daemon.gameday.stage import AMOUNTS, Stage
from engine.errors import InferdError
from telemetry.client import ClientError

_PATIENCE_SECONDS: Final = 150.0  # a daemon that starts again, on a machine that does other work too
_LOOKS: Final = 3  # without the finding, one after the other
_ANSWERS: Final = 15  # of short requests: by then a planted cap has seen its dozen steps, and what was to break it came
_UNREAD_TOKENS: Final = 200  # a client that has let so many wait, and does not move, does not read
_GAUGES: Final = ("slow_client",)  # whose metric must be back at nothing; every other one is a counter


@dataclass(frozen=True, slots=True)
class Remedy:
    """`words` as `inferd doctor` has them, or in brackets what is done to the world around. `again`: the same is
    planted once more after it, and must not happen."""

    words: str
    again: bool = False


_CHUNKS: Final = Remedy("do set prefill_chunk=4 max_num_batched_tokens=16", again=True)
_RESTART: Final = Remedy("do restart-engine")
REMEDIES: Final[Mapping[str, Remedy]] = {
    "capacity": Remedy("do set max_num_seqs=1", again=True),
    "spike": _CHUNKS,
    "logits": _CHUNKS,
    "address_space": _CHUNKS,
    "fragmentation": _RESTART,
    "kv": Remedy("do set kv_blocks=64", again=True),
    "neighbour": Remedy("(the neighbour is ended)"),
    "leak": _RESTART,
    "wedge": _RESTART,
    "wedge_for_good": _RESTART,
    "kill_engine": Remedy("(the daemon starts the engine again)"),
    "kill_both": Remedy("(inferd is started again)"),
    "slow_client": Remedy("do abort REQUEST_ID"),
    "full_disk": Remedy("(room is made)"),
    "collector_down": Remedy("(inferd is started again without the dead endpoint)"),
}


def apply(stage: Stage) -> float:
    """Do it. Returns when that was; what happened before it is no longer looked at."""
    words = REMEDIES[stage.name].words.split()
    if words[-1] == "REQUEST_ID":
        _abort_the_unread(stage, words[1])
    elif words[0] == "do":
        with contextlib.suppress(InferdError):  # an engine that is already gone need not be ended
            remedies.act(stage.scratch.client, words[1], words[2:])
    elif stage.name == "collector_down":
        stage.scratch.stop()
        stage.scratch.drills = ()
        stage.scratch.start()
    elif stage.name == "neighbour":
        stage.scratch.client.post("/inferd/v1/drill/none", {})
    elif stage.name == "full_disk":
        lasts = AMOUNTS[stage.name] / 1000
        time.sleep(max(0.0, stage.began + lasts + 1 - time.monotonic()))
    return time.monotonic()


def _abort_the_unread(stage: Stage, action: str) -> None:
    """Each request that was given many tokens and whose output stands still, until there is none: who waited for their
    blocks may not read either."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < end:
        before = _outputs(stage)
        time.sleep(1.0)
        after = _outputs(stage)
        still = [each for each, n in after.items() if n >= _UNREAD_TOKENS and before.get(each) == n]
        for request_id in still:
            with contextlib.suppress(InferdError, ClientError):  # it has ended meanwhile
                remedies.act(stage.scratch.client, action, [request_id])
        stage.scrape()
        if not still and not stage.metric():
            return


def _outputs(stage: Stage) -> dict[str, int]:
    """Tokens made for each running request."""
    seen = stage.scratch.client.snapshot(["requests"]).requests
    return {each.request_id: each.output_tokens or 0 for each in (seen.live if seen else None) or ()}


def proved(stage: Stage, since: float) -> str:
    """What is missing in the proof; empty if there is nothing."""
    end = time.monotonic() + _PATIENCE_SECONDS
    if not _answered(stage, 1, end):
        return "after the remedy nobody was answered"
    stage.scrape()
    before = stage.metric()
    if REMEDIES[stage.name].again:
        stage.plant()
        if not _answered(stage, _ANSWERS, time.monotonic() + _PATIENCE_SECONDS):
            return f"planted again after the remedy, fewer than {_ANSWERS} were answered"
    well, end = 0, time.monotonic() + _PATIENCE_SECONDS
    while well < _LOOKS:
        if time.monotonic() > end:
            return "after the remedy the finding was still made"
        time.sleep(1.0)
        found = stage.findings(since) if stage.scratch.ready() else None
        well = well + 1 if found is not None and all(f.runbook != stage.drill.runbook for f in found) else 0
    stage.scrape()
    if stage.metric() > (0 if stage.name in _GAUGES else before):
        return f"after the remedy {stage.drill.metric} went on"
    return "" if _answered(stage, 1, end) else "after the remedy nobody was answered"


def _answered(stage: Stage, more: int, end: float) -> bool:
    """So many more requests are answered by a daemon that is ready, before `end`."""
    known = stage.scratch.answered
    while time.monotonic() < end:
        if stage.scratch.answered >= known + more and stage.scratch.ready():
            return True
        time.sleep(0.1)
    return False
