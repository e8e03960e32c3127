"""BlockAges: how long blocks live, lie idle before they are evicted, and wait to be used again; of a sample of them.

Owns the stamps of every n-th block and the samples since they were last taken. It must not know who holds a block, and
reads no clock: whoever moves blocks sets `now_ns` first. Enter at the hooks that engine/kv/pool.py calls; `drain` hands
the samples to the heartbeat.
"""

from array import array
from collections.abc import Iterable

from telemetry.events import BLOCK_AGES

_SAMPLED = 512  # blocks that are looked at, about
_MOST_SAMPLES = 1024  # of a kind between two heartbeats; more are not kept
_MS = 1_000_000


class BlockAges:
    """`lifetime`: from being taken to being free; `idle_before_evict`: from the last release of a cached block until it
    is evicted; `reuse_gap`: from that release until somebody shares it again."""

    def __init__(self, num_blocks: int) -> None:
        self.now_ns = 0
        self._stride = max(1, num_blocks // _SAMPLED)
        self._taken_ns: dict[int, int] = {}
        self._idle_ns: dict[int, int] = {}
        self._samples: dict[str, array[int]] = {kind: array("I") for kind in BLOCK_AGES}

    def taken(self, blocks: Iterable[int]) -> None:
        """They were free, and a table has them."""
        for block in blocks:
            if block % self._stride == 0:
                self._taken_ns[block] = self.now_ns

    def cached(self, block: int) -> None:
        """Nobody holds it any more, but it may be shared."""
        if block % self._stride == 0:
            self._idle_ns[block] = self.now_ns

    def shared(self, block: int) -> None:
        """It was cached, and a table has it again."""
        self._sample("reuse_gap", self._idle_ns.pop(block, None))

    def freed(self, block: int) -> None:
        """It is free, be it released or evicted."""
        if block % self._stride == 0:
            self._sample("idle_before_evict", self._idle_ns.pop(block, None))
            self._sample("lifetime", self._taken_ns.pop(block, None))

    def drain(self) -> dict[str, bytes]:
        """The samples since the last call, uint32 milliseconds each; kinds without any are left out."""
        taken = {kind: samples.tobytes() for kind, samples in self._samples.items() if samples}
        for kind in taken:
            self._samples[kind] = array("I")
        return taken

    def sizes(self) -> dict[str, int]:
        """Entries of the maps; at most two for each sampled block."""
        return {"pool_ages": len(self._taken_ns) + len(self._idle_ns)}

    def _sample(self, kind: str, since_ns: int | None) -> None:
        samples = self._samples[kind]
        if since_ns is not None and len(samples) < _MOST_SAMPLES:
            samples.append(max(0, self.now_ns - since_ns) // _MS)
