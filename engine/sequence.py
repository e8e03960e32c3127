"""Sequence: one choice while the engine has it: its tokens, how far they are computed, its blocks, row and state.

Also the stopwatch that partitions its life into stages. Owned and changed by the scheduler only. It must not read a
clock: every stamp is handed in. Enter at `Sequence`; `view` and `facts` are what others get to see.

The one rule: a sequence is `tokens` of which the first `computed` are in the KV store; a step grants it some of the
rest. There is no prefill and no decode in its state; those are names for the stages a person sees.
"""

from dataclasses import dataclass
from enum import StrEnum

from engine.policy import Rank
from engine.request import EngineFacts, Request


class State(StrEnum):
    """waiting → running ⇄ preempted, and from each of them → finished."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_MOST_PIECES = 512  # of one sequence: a cap on memory; one with more has its sums only


class Stopwatch:
    """Partitions [start, now] into named stages: exactly one runs at any time, so they always sum to the whole.

    `pieces` has the same time in the order in which it passed, as (stage, ns, tokens): a new one at every change of
    stage and at every `lap`.
    """

    __slots__ = ("_piece_ns", "_since_ns", "pieces", "stage", "stages")

    def __init__(self, stage: str, now_ns: int) -> None:
        self.stage = stage
        self.stages: dict[str, int] = {}
        self.pieces: list[tuple[str, int, int]] = []
        self._since_ns = self._piece_ns = now_ns

    def enter(self, stage: str, now_ns: int) -> None:
        """From now on the time belongs to `stage`."""
        if stage == self.stage:
            return
        self.stages[self.stage] = self.stages.get(self.stage, 0) + now_ns - self._since_ns
        self.lap(now_ns)
        self.stage = stage
        self._since_ns = now_ns

    def lap(self, now_ns: int, tokens: int = 0) -> None:
        """A piece of the stage ends here, in which so many tokens were computed. What is left over after the last
        such piece belongs to it."""
        length_ns, self._piece_ns = now_ns - self._piece_ns, now_ns
        pieces = self.pieces
        if pieces and not tokens and pieces[-1][0] == self.stage:
            pieces[-1] = (self.stage, pieces[-1][1] + length_ns, pieces[-1][2])
        elif length_ns and len(pieces) <= _MOST_PIECES:
            pieces.append((self.stage, length_ns, tokens))

    def stop(self, now_ns: int) -> dict[str, int]:
        """ns by stage up to now."""
        self.enter("", now_ns)
        return self.stages


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """A live choice as a snapshot shows it. Counts in tokens unless named otherwise; `row` is -1 without one."""

    request_id: str
    group_id: str
    state: str
    stage: str
    priority: int
    row: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    cached_tokens: int
    max_tokens: int
    kv_blocks: int
    preemptions: int
    unacknowledged: int
    received_ns: int
    scheduled_ns: int
    first_token_ns: int


class Sequence:
    """Plain mutable record with slots: the scheduler walks over hundreds of them in every step."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "computed",
        "digests",
        "first_token_ns",
        "followers",
        "last_token_ns",
        "leader",
        "max_len",
        "named_blocks",
        "preempted_tokens",
        "preemptions",
        "prefill_chunks",
        "prompt_len",
        "prompt_logprobs_sent",
        "rank",
        "received_ns",
        "recompute_until",
        "request",
        "row",
        "scheduled_ns",
        "state",
        "stops",
        "tokens",
        "unacked",
        "watch",
    )

    def __init__(self, request: Request, rank: Rank, max_len: int, now_ns: int) -> None:
        self.request = request
        self.tokens: list[int] = list(request.prompt)
        self.prompt_len = len(self.tokens)
        self.stops = frozenset(request.sampling.stop_token_ids)
        self.max_len = max_len  # prompt + output: never longer
        self.computed = 0  # positions in the KV store
        self.blocks: list[int] = []  # covers all tokens from admission on, and grows with them
        self.digests: list[bytes] = []  # of full blocks, as far as somebody asked
        self.named_blocks = 0  # leading blocks that were offered to the prefix cache
        self.row = -1
        self.state = State.WAITING
        self.rank = rank
        self.unacked = 0  # output tokens that the reader has not taken
        self.recompute_until = 0  # positions that were computed before a preemption
        self.leader: Sequence | None = None  # of its group: its prompt's blocks can be shared while it runs
        self.followers: list[Sequence] = []  # held back until the prompt is computed
        self.watch = Stopwatch("queue", now_ns)
        self.received_ns = now_ns
        self.scheduled_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0
        self.cached_tokens = 0
        self.prefill_chunks = 0
        self.preemptions = 0
        self.preempted_tokens = 0
        self.prompt_logprobs_sent = 0

    @property
    def pending(self) -> int:
        """Known positions that are not computed."""
        return len(self.tokens) - self.computed

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    def stage_computing(self) -> str:
        """The stage of a sequence whose grant is on the device."""
        if self.computed < self.recompute_until:
            return "preempted"
        return "decode" if self.first_token_ns else "prefill"

    def facts(self, now_ns: int, block_size: int) -> EngineFacts:
        """What is known at its end, which is now: this stops the stopwatch."""
        stages = self.watch.stop(now_ns)
        return EngineFacts(
            received_ns=self.received_ns,
            emitted_ns=now_ns,
            scheduled_ns=self.scheduled_ns,
            first_token_ns=self.first_token_ns,
            last_token_ns=self.last_token_ns,
            queue_ns=stages.get("queue", 0),
            prefill_ns=stages.get("prefill", 0),
            prefill_wait_ns=stages.get("prefill_wait", 0),
            decode_ns=stages.get("decode", 0),
            preempted_ns=stages.get("preempted", 0),
            pieces=tuple(self.watch.pieces) if len(self.watch.pieces) <= _MOST_PIECES else (),
            cached_tokens=self.cached_tokens,
            prefill_chunks=self.prefill_chunks,
            preemptions=self.preemptions,
            preempted_tokens=self.preempted_tokens,
            kv_blocks=len(self.blocks),
            kv_tail_slots=max(0, len(self.blocks) * block_size - len(self.tokens)),
        )

    def view(self) -> SequenceView:
        return SequenceView(
            request_id=self.request.id,
            group_id=self.request.group_id,
            state=self.state,
            stage=self.watch.stage,
            priority=self.request.priority,
            row=self.row,
            prompt_tokens=self.prompt_len,
            output_tokens=self.output_len,
            computed_tokens=self.computed,
            cached_tokens=self.cached_tokens,
            max_tokens=self.request.sampling.max_tokens,
            kv_blocks=len(self.blocks),
            preemptions=self.preemptions,
            unacknowledged=self.unacked,
            received_ns=self.received_ns,
            scheduled_ns=self.scheduled_ns,
            first_token_ns=self.first_token_ns,
        )
