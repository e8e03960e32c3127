"""Roster: every live sequence and the state it is in: waiting, running in a row, preempted, or gone.

Each change of state happens in one method here, with all that belongs to it: rows, queue, blocks, deadlines, stopwatch,
and what the device has to hear. It must not decide who changes state (engine/scheduler.py, by engine/policy.py). Enter
at `arrive`; then `enter`, `preempt`, `finish`.
"""

from collections.abc import Iterator

from engine import policy
from engine.kv.space import Found, KvSpace
from engine.output import Output
from engine.plan import Admission, Preemption
from engine.plan_builder import PlanBuilder
from engine.request import FinishReason, Request, TokenLogprob
from engine.sequence import Sequence, State
from engine.waiting import LazyHeap, WaitingQueue


class Roster:
    """`running` is by row, the one that was granted nothing for longest first. `credit`: output tokens that a reader
    may leave unread before its sequence is *stalled*."""

    def __init__(self, kv: KvSpace, rows: int, credit: int) -> None:
        self.live: dict[str, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.preempted = 0
        self.next = PlanBuilder()  # the plan under way
        self._kv = kv
        self._credit = credit
        self._free_rows = list(range(rows - 1, -1, -1))
        self._parked: set[Sequence] = set()  # preempted while stalled: not to be resumed before their reader reads
        self._deadlines: LazyHeap[Sequence] = LazyHeap()
        self._arrivals = 0

    @property
    def never_admitted(self) -> int:
        return len(self.live) - len(self.running) - self.preempted

    @property
    def next_deadline_ns(self) -> int:
        """The earliest deadline of a live sequence; 0 = none."""
        first = self._deadlines.first()
        return first[0][0] if first else 0

    def arrive(self, request: Request, granted_tokens: int, context_limit: int, now_ns: int) -> Sequence:
        """A new sequence, in no queue yet. Raises ValueError for an id that is in use."""
        if request.id in self.live:
            raise ValueError(f"request id {request.id!r} is in use")
        self._arrivals += 1
        standing = policy.rank(granted_tokens, request.priority, self._arrivals)
        most = min(len(request.prompt) + request.sampling.max_tokens, context_limit)
        sequence = self.live[request.id] = Sequence(request, standing, most, now_ns)
        if request.deadline_ns:
            self._deadlines.push((request.deadline_ns, self._arrivals), sequence)
        return sequence

    def follow(self, sequence: Sequence, leader: Sequence) -> None:
        """Hold it back until the prompt of its group's leader is computed, or the leader lost its blocks."""
        sequence.leader = leader
        leader.followers.append(sequence)

    def release_followers(self, leader: Sequence) -> None:
        """They may be admitted from now on."""
        for sequence in leader.followers:
            if sequence.state is State.WAITING:
                self.waiting.push(sequence)
        leader.followers = []

    def enter(self, sequence: Sequence, found: Found, now_ns: int) -> None:
        """It has its blocks: out of the queue and into a row."""
        self.waiting.discard(sequence)
        recomputed = sequence.state is State.PREEMPTED
        sequence.state = State.RUNNING
        sequence.leader = None
        sequence.row = self._free_rows.pop()
        self.running[sequence.row] = sequence
        if recomputed:
            self.preempted -= 1
        else:
            sequence.scheduled_ns = now_ns
            sequence.cached_tokens = found.tokens
        sequence.watch.enter(sequence.stage_computing(), now_ns)
        missed = len(sequence.tokens) - found.tokens - found.too_short
        self.next.admit(
            sequence,
            Admission(sequence.request.id, sequence.row, found.tokens, missed, found.too_short, recomputed),
        )

    def preempt(self, sequence: Sequence, cause: str, now_ns: int) -> None:
        """Its blocks and row are needed otherwise: it waits again, and all it computed is to be computed again."""
        lost = sequence.computed
        self._leave_row(sequence)
        sequence.state = State.PREEMPTED
        sequence.preemptions += 1
        sequence.preempted_tokens += lost
        sequence.recompute_until = max(sequence.recompute_until, lost)
        sequence.watch.enter("preempted", now_ns)
        self.preempted += 1
        self.next.preempted(Preemption(sequence.request.id, lost, cause))
        if self.stalled(sequence):
            self._parked.add(sequence)
        else:
            self.waiting.push(sequence)
        self.release_followers(sequence)

    def finish(
        self,
        sequence: Sequence,
        finish: FinishReason,
        now_ns: int,
        *,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        prompt_logprobs: tuple[TokenLogprob | None, ...] = (),
        stop_token: int | None = None,
        code: str = "",
        why: str = "",
    ) -> Output:
        """Forget it, whatever its state. Returns its last output."""
        facts = sequence.facts(now_ns, self._kv.block_size)
        if sequence.state is State.RUNNING:
            self._leave_row(sequence)
        elif sequence.state is State.PREEMPTED:
            self.preempted -= 1
        self.waiting.discard(sequence)
        self._parked.discard(sequence)
        self._deadlines.discard(sequence)
        sequence.state = State.FINISHED
        del self.live[sequence.request.id]
        self.release_followers(sequence)
        return Output(
            request_id=sequence.request.id,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish=finish,
            stop_token=stop_token,
            error_code=code,
            error=why,
            facts=facts,
            at_ns=now_ns,
        )

    def stalled(self, sequence: Sequence) -> bool:
        """Whether its reader has to read before it may produce more."""
        return sequence.unacked >= self._credit

    def acknowledge(self, sequence: Sequence, tokens: int) -> None:
        """Its reader has taken so many more tokens."""
        sequence.unacked = max(0, sequence.unacked - tokens)
        if sequence in self._parked and not self.stalled(sequence):
            self._parked.discard(sequence)
            self.waiting.push(sequence)

    def overdue(self, now_ns: int) -> Iterator[Sequence]:
        """The sequences whose deadline has passed; each must be finished before the next is asked for."""
        while (first := self._deadlines.first()) is not None and first[0][0] <= now_ns:
            yield first[1]

    def youngest(self) -> Sequence:
        """The running one with the lowest standing: the first to be preempted."""
        return max(self.running.values(), key=_rank)

    def youngest_stalled(self) -> Sequence | None:
        """The same among the running ones that cannot use their blocks until their reader reads."""
        return max(filter(self.stalled, self.running.values()), key=_rank, default=None)

    def sizes(self) -> dict[str, int]:
        """Entries of every queue and map in here that grows with use."""
        return {
            "sequences": len(self.live),
            "running": len(self.running),
            "waiting": len(self.waiting),
            "waiting_entries": self.waiting.entries,
            "parked": len(self._parked),
            "deadlines": self._deadlines.entries,
        }

    def _leave_row(self, sequence: Sequence) -> None:
        del self.running[sequence.row]
        self._free_rows.append(sequence.row)
        self.next.release(sequence)
        sequence.row = -1
        self._kv.close(sequence)


def _rank(sequence: Sequence) -> policy.Rank:
    return sequence.rank
