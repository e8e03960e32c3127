"""The history: a few figures of the last half hour, so that what creeps can be told from what is large.

Owns which figures of a snapshot are kept, how often and for how long. It must not know who asks for them. Enter at
`History.take`; reading `samples` is safe from any thread.
"""

from collections import deque
from typing import Final

from telemetry.parts import Sample
from telemetry.snapshot import Snapshot

PARTS: Final = ("queue", "kv", "memory", "totals")  # of the snapshot that `take` needs
EVERY_SECONDS: Final = 10.0
KEPT: Final = 180


class History:
    """Half an hour of samples."""

    def __init__(self, kept: int = KEPT) -> None:
        self._samples: deque[Sample] = deque(maxlen=kept)

    @property
    def samples(self) -> list[Sample]:
        """Oldest first."""
        return list(self._samples)

    def take(self, snapshot: Snapshot) -> None:
        """Keep what a sample needs of `snapshot`; parts it lacks are 'not reported'."""
        queue, kv, memory, totals = snapshot.queue, snapshot.kv, snapshot.memory, snapshot.totals
        tokens = (totals.step_tokens if totals else None) or {}
        self._samples.append(
            Sample(
                at_ns=snapshot.at_ns,
                running=queue.running if queue else None,
                waiting=queue.waiting if queue else None,
                kv_active=kv.active if kv else None,
                daemon_resident_bytes=memory.daemon_resident_bytes if memory else None,
                engine_resident_bytes=memory.engine_resident_bytes if memory else None,
                used_bytes=memory.used_bytes if memory else None,
                unbooked_bytes=(memory.owners or {}).get("unbooked") if memory else None,
                output_tokens=tokens.get("decode", 0),
                granted_tokens=sum(tokens.values()),
                recompute_tokens=tokens.get("recompute", 0),
                preemptions=sum(totals.preemptions.values()) if totals else 0,
                dropped=dict(totals.telemetry_dropped or {}) if totals else {},
            )
        )
