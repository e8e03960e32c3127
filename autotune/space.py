"""The knobs: which limits can be tuned, between which bounds, live or at a restart; and where the memory lines lie.

Owns bounds and the two lines: the watermark, which admission is steered by, and the hard line, which `kv_blocks` holds
by construction. Pure. It must not know rules or measurements beyond what is handed in. Enter at `Space`.
"""

from dataclasses import dataclass, field
from typing import Final

from engine.budget import Limits, Resolved
from engine.kv.layout import blocks_for

WATERMARK: Final = 0.70  # of the memory limit: what is in use should stay below
HARD_LINE: Final = 0.85  # and never passes this
LEAST_CONTEXT: Final = 256  # tokens; a limit below that would refuse what everybody asks
FIRST_CHARGE: Final = 256  # tokens of answer, while nobody knows how long they become
_PLANNED: Final = 0.96  # of the blocks below the watermark that admission fills: what it foresees is a mean
_LEAST_SHARE: Final = 4  # a watermark below a quarter of the hard line's blocks is none: the rest alone is nearly there


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One limit. `live`: it may change between two steps, else only with a restart."""

    name: str
    about: str
    floor: int
    live: bool = True


KNOBS: Final[dict[str, Knob]] = {
    knob.name: knob
    for knob in (
        Knob(name="max_num_seqs", about="sequences that run at once", floor=1),
        Knob(name="max_num_batched_tokens", about="positions granted in a step", floor=16),
        Knob(name="prefill_chunk", about="positions of prompts in a step that others decode in", floor=16),
        Knob(name="max_partial_prefills", about="prompts that are partly computed at once", floor=1),
        Knob(name="context_limit", about="prompt and answer of one request", floor=LEAST_CONTEXT),
        Knob(name="kv_blocks", about="blocks that may be active: the hard line", floor=1),
        Knob(name="watermark_blocks", about="blocks that admission plans to fill; 0 = no such line", floor=0),
        Knob(name="charge_tokens", about="tokens of answer that a newcomer is charged for", floor=0),
    )
}
# What is allocated or decided at start, and so needs a restart: `inferd tune search` is for these.
AT_START: Final = ("rows", "step_tokens", "max_model_len", "block_size", "dtype", "threads", "prefix_cache")


@dataclass(frozen=True, slots=True)
class Space:
    """The bounds for one engine. `pinned` knobs are left alone. `fixed_bytes` is what is in use beside the active
    blocks: planned at start, later as measured."""

    resolved: Resolved
    pinned: frozenset[str] = field(default=frozenset())
    fixed_bytes: int = 0

    @classmethod
    def of(cls, resolved: Resolved) -> "Space":
        planned = resolved.weights_bytes + resolved.activation_bytes + resolved.workspace_bytes + resolved.runtime_bytes
        return cls(resolved, fixed_bytes=planned)

    def bounds(self, name: str) -> tuple[int, int]:
        """The legal values of a knob: floor and ceiling."""
        ceiling = self.resolved.ceilings()[name]
        if name == "kv_blocks":
            return self.least_blocks, max(self.least_blocks, self.hard_blocks)
        return min(KNOBS[name].floor, ceiling), ceiling

    def clamped(self, changes: dict[str, int]) -> dict[str, int]:
        """Only tunable, unpinned knobs, each within its bounds."""
        legal = {}
        for name, value in changes.items():
            if name in KNOBS and name not in self.pinned:
                low, high = self.bounds(name)
                legal[name] = max(low, min(high, value))
        return legal

    @property
    def least_blocks(self) -> int:
        """What the longest request needs: with fewer, what was promised at start could not be served."""
        return min(self.resolved.kv_blocks, blocks_for(self.resolved.max_model_len, self.resolved.block_size))

    @property
    def hard_blocks(self) -> int:
        """How many blocks may be active so that what is in use never passes the hard line."""
        return min(self.resolved.kv_blocks, max(self.least_blocks, self._room(HARD_LINE)))

    @property
    def watermark_blocks(self) -> int:
        """How many active blocks bring what is in use to the watermark; at least one, if the rest alone is past it."""
        return max(1, min(self.resolved.kv_blocks, self._room(WATERMARK)))

    @property
    def admission_blocks(self) -> int:
        """The watermark, as admission plans for it; 0 where it would let hardly anybody in: then the hard line alone
        holds, and `unreachable` says so."""
        room = min(self.resolved.kv_blocks, self._room(WATERMARK))
        return int(_PLANNED * room) if _LEAST_SHARE * room >= self.hard_blocks else 0

    def unreachable(self) -> str:
        """Why a line cannot be held, for people; empty if both can."""
        resolved = self.resolved
        limit = resolved.memory_limit_bytes
        if not limit:
            return ""
        for line, name in ((HARD_LINE, "the hard line"), (WATERMARK, "the watermark")):
            if self._room(line) < self.least_blocks < resolved.kv_blocks or self._room(line) < 1:
                need = self.fixed_bytes + self.least_blocks * resolved.kv_block_bytes
                return (
                    f"{name} of {line:.0%} cannot be held: what is not KV and one request of {resolved.max_model_len} "
                    f"tokens take {need / limit:.0%} of the limit; give a larger --memory-limit or a smaller "
                    f"--max-model-len"
                )
        return ""

    def start(self, limits: Limits) -> Limits:
        """The limits to begin with: those of the engine, with `kv_blocks` at the hard line, and admission at the
        watermark."""
        charge = limits.charge_tokens or min(FIRST_CHARGE, self.resolved.max_model_len)
        return limits.replaced(
            {
                "kv_blocks": min(limits.kv_blocks, self.hard_blocks),
                "watermark_blocks": self.admission_blocks,
                "charge_tokens": charge,
            }
        )

    def _room(self, line: float) -> int:
        limit, per_block = self.resolved.memory_limit_bytes, self.resolved.kv_block_bytes
        if not limit or not per_block:
            return self.resolved.kv_blocks
        return int((line * limit - self.fixed_bytes) // per_block)
