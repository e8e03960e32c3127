"""StepPlan, SeqSlice, StepResult: what crosses between the control plane and the device plane, and the Runner protocol.

The two planes share this file and nothing else. A plan is a *diff*: the device keeps per-row state (tokens, block
table, sampling), a plan says which rows begin, end and advance. Stdlib only: it must load on a bare GPU machine.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, Protocol

from engine.request import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class RowInit:
    """Row `row` now belongs to `request_id`. `tokens` is all that is known of it (prompt, then what was generated
    before a preemption); the first `prompt_len` are the prompt. `blocks` are the table it starts with (prefix hits)."""

    row: int
    request_id: str
    tokens: tuple[int, ...]
    prompt_len: int
    sampling: SamplingParams
    blocks: tuple[int, ...] = ()


class SeqSlice(NamedTuple):
    """A grant: compute positions [start, start + count) of `row`, after appending `new_blocks` to its table.

    `sample` asks for a token after the last position; the device stores it at position start + count of the row.
    Positions from 0 up to `start` are already in the KV store. (A tuple, since one is made for every row in every step,
    and `one_each` makes them in a third of the time that objects would take.)
    """

    row: int
    start: int
    count: int  # type: ignore[assignment]  # tuples have a method of that name
    new_blocks: tuple[int, ...] = ()
    sample: bool = False
    draft: tuple[int, ...] = ()
    replaced_blocks: tuple[tuple[int, int], ...] = ()  # (index in the table, block id): after a copy on write

    @classmethod
    def one_each(cls, starts: Iterable[tuple[int, int]]) -> "Iterator[SeqSlice]":
        """One position that samples for each (row, start)."""
        return map(tuple.__new__, repeat(cls), [(row, start, 1, (), True, (), ()) for row, start in starts])


@dataclass(frozen=True, slots=True)
class Admission:
    """`cached_tokens` were found in the prefix cache; `too_short_tokens` matched a prefix but not a whole block."""

    request_id: str
    row: int
    cached_tokens: int
    missed_tokens: int
    too_short_tokens: int
    recomputed: bool  # after a preemption: its cache counts are not traffic's


@dataclass(frozen=True, slots=True)
class Preemption:
    """`request_id` lost its row and blocks; `tokens_lost` positions have to be computed again."""

    request_id: str
    tokens_lost: int
    cause: str


@dataclass(frozen=True, slots=True)
class PlanWhy:
    """Why the plan is as it is: for the step report, not for the device."""

    admitted: tuple[Admission, ...] = ()
    preempted: tuple[Preemption, ...] = ()
    waiting_capacity: int = 0  # no row, or max_num_seqs reached
    waiting_kv: int = 0  # not enough blocks
    waiting_budget: int = 0  # tokens of this step used up, or partial prefills at their cap
    prefill_rows: int = 0
    decode_rows: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recompute_tokens: int = 0
    draft_tokens: int = 0
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The device applies, in this order: released, admitted, discarded, copies, then the slices."""

    step: int
    slices: tuple[SeqSlice, ...]
    admitted: tuple[RowInit, ...] = ()
    released: tuple[int, ...] = ()  # rows
    copies: tuple[tuple[int, int], ...] = ()  # (source block, target block), before any slice writes
    discarded: tuple[int, ...] = ()  # free blocks whose memory may be given back
    why: PlanWhy = PlanWhy()

    @property
    def tokens(self) -> int:
        return sum(s.count for s in self.slices)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device did. `tokens[i]` belongs to `slices[i]`: empty if it did not sample, else the accepted tokens.

    `logprobs` and `prompt_logprobs` are aligned the same way and empty when nobody asked.
    """

    step: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    forward_ns: int = 0
    sample_ns: int = 0
    memory_peak_bytes: int = 0


class Runner(Protocol):
    """The device plane as the loop sees it. Not thread-safe. `launch` may be called again before `collect`, up to
    `depth` times; results come in order."""

    depth: int

    def launch(self, plan: StepPlan) -> None:
        """Begin a step. Raises EngineFault, or OutOfMemory: then the plan's diff (rows, tables, copies, discards) is
        applied and stays, but nothing was sampled, and the same positions will be granted again by a later plan."""

    def collect(self) -> StepResult:
        """The oldest launched step's result. Raises OutOfMemory or EngineFault."""

    def tell(self, tick: Callable[[str], None]) -> None:
        """Call `tick` with a phase (engine/pulse.py) whenever a launch gets further: it costs a microsecond."""

    def close(self) -> None:
        """Give everything back."""
