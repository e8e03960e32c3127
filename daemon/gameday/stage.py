"""One drill on its scratch daemon, while it lasts: planting it, and every reading that tells of it.

Owns the readings. It must not know what is made of them (play.py) nor any remedy (proof.py). Enter at `Stage`.
"""

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from daemon import remedies
from daemon.drills import Drill
from daemon.gameday import rules
from daemon.gameday.scratch import Scratch
from runbooks import check, gather
from runbooks.evidence import Targets
from telemetry.client import ClientError
from telemetry.events import Finding

# A game day may run on a machine that does other work too: that it is slow is no finding of a drill.
_TARGETS: Final = Targets(ttft_seconds=1e9, inter_token_seconds=1e9, loop_lag_seconds=1e9)
# Milliseconds that it lasts, or bytes. An out-of-memory is planted again after its remedy: its cap must not follow what
# steps have come to need meanwhile. 300 kB are one row of game day's model, not three; 1 MB is what 80 blocks take.
AMOUNTS: Final[Mapping[str, int]] = {
    "wedge": 36_000,
    "full_disk": 16_000,
    "slow_client": 120_000,
    "capacity": 300_000,
    "spike": 1_500_000,
    "logits": 1_500_000,
    "address_space": 1_000_000,
    "kv": 1_000_000,
}


@dataclass(slots=True)
class Stage:
    """`began` and `before` (of the drill's metric) are of the moment before it was planted."""

    name: str
    drill: Drill
    scratch: Scratch
    watch: rules.Watch
    began: float = field(default_factory=time.monotonic)
    before: float = math.nan

    def prepare(self) -> None:
        """The limits that the drill needs."""
        if self.drill.limits:
            remedies.act(self.scratch.client, "set", [f"{knob}={n}" for knob, n in self.drill.limits.items()])

    def plant(self) -> None:
        """A daemon that is killed by it does not answer."""
        with contextlib.suppress(ClientError):
            self.scratch.client.post(f"/inferd/v1/drill/{self.name}", {"amount": AMOUNTS.get(self.name, 0)})

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
