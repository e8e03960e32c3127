"""Scheduler: which sequence gets how many positions in the next step, and what becomes of the tokens that come back.

One rule covers everything: a step grants `count` positions, so that `computed` approaches `len(tokens)`. A prefix hit
begins higher, a chunk is a smaller grant, decode is a grant of 1, preemption begins again at 0. It must not know the
device, the clock (every stamp is handed in), text or transport. Who goes first and how much each gets is
engine/policy.py's, who holds which block engine/kv/space.py's, who is in which state engine/roster.py's.
Enter at `plan` and `commit`. `computed` moves in commit alone, so a step that failed needs no undoing.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from engine import policy
from engine.acceptance import NO_LOGPROBS, accept, logprobs_of
from engine.budget import Limits, Resolved
from engine.errors import ContextTooLong, DeadlineExceeded
from engine.features import Parts
from engine.kv.ages import BlockAges
from engine.kv.pool import BlockPool
from engine.kv.prefix import NoPrefixCache, PrefixCache, Prefixes
from engine.output import Output
from engine.plan import SeqSlice, StepPlan, StepResult
from engine.plan_builder import PlanBuilder
from engine.report import StateFacts
from engine.request import FinishReason, Request
from engine.roster import Roster
from engine.sequence import Sequence, SequenceView, State


class Scheduler:
    """Not thread-safe. At most one plan is out at a time: `plan`, then `commit` or `retry_after_oom`.

    `cache_root` names the model and whatever else cached KV depends on; `output_credit` is how many output tokens a
    request may have that its reader has not taken."""

    def __init__(
        self,
        resolved: Resolved,
        limits: Limits,
        *,
        cache_root: str = "",
        output_credit: int = 256,
        parts: Parts | None = None,
    ) -> None:
        self._resolved = resolved
        self._limits = limits.within(resolved)
        size = resolved.block_size
        prefixes: Prefixes = PrefixCache(cache_root, size) if resolved.prefix_cache else NoPrefixCache()
        self._ages = BlockAges(resolved.kv_blocks)
        self._pool = BlockPool(resolved.kv_blocks, prefixes.forget, self._ages)
        self._parts = parts or Parts()
        self._kv = self._parts.space(self._pool, prefixes, size, resolved.max_model_len)
        self._kv.set_limits(limits.kv_blocks, limits.watermark_blocks, limits.charge_tokens)
        self._credit = output_credit
        self._roster = Roster(self._kv, resolved.rows, output_credit)
        self._flight: dict[Sequence, SeqSlice] | None = None  # what the plan that is out granted; None = no plan is out
        self._ended: list[Output] = []  # ends that happened while planning; handed out by the next commit
        self._step = 0
        self._granted_tokens = 0  # in all steps: the clock of engine/policy.py
        self._token_cap = 0  # of a step, after one ran out of memory; 0 = the limits alone

    @property
    def has_work(self) -> bool:
        """Whether a step would do something, if only tell the device what has ended."""
        return bool(self._roster.live or self._ended or self._roster.next.pending or self._pool.discards_due)

    @property
    def next_deadline_ns(self) -> int:
        """The earliest deadline of a live choice; 0 = none."""
        return self._roster.next_deadline_ns

    def add(self, requests: Iterable[Request], now_ns: int) -> list[Output]:
        """Take new choices; those of one group with one prompt will share its blocks. Returns the ends of those that
        can never be served. Raises ValueError for an id that is in use."""
        outputs: list[Output] = []
        leaders: dict[tuple[str, str, tuple[int, ...]], Sequence] = {}
        for request in requests:
            sequence = self._roster.arrive(request, self._granted_tokens, self._limits.context_limit, now_ns)
            refusal = self._refusal(sequence)
            if refusal:
                outputs.append(
                    self._roster.finish(sequence, FinishReason.ERROR, now_ns, code=ContextTooLong.code, why=refusal)
                )
                continue
            leader = sequence
            if request.group_id:
                leader = leaders.setdefault((request.group_id, request.cache_salt, request.prompt), sequence)
            if leader is sequence:
                self._roster.waiting.push(sequence)
            else:
                self._roster.follow(sequence, leader)
        return outputs

    def cancel(self, request_ids: Iterable[str], reason: str, now_ns: int) -> list[Output]:
        """End these choices now; their blocks are free when this returns. Unknown ids are ignored."""
        self._ages.now_ns = now_ns
        outputs = []
        for request_id in request_ids:
            sequence = self._roster.live.get(request_id)
            if sequence is not None:
                outputs.append(self._roster.finish(sequence, FinishReason(reason), now_ns))
        return outputs

    def fail(self, request_id: str, code: str, message: str, now_ns: int) -> list[Output]:
        """End one choice with an error. An unknown id is ignored."""
        sequence = self._roster.live.get(request_id)
        if sequence is None:
            return []
        return [self._roster.finish(sequence, FinishReason.ERROR, now_ns, code=code, why=message)]

    def ack(self, taken: Mapping[str, int]) -> None:
        """Readers have taken so many more tokens of each choice."""
        for request_id, tokens in taken.items():
            sequence = self._roster.live.get(request_id)
            if sequence is not None:
                self._roster.acknowledge(sequence, tokens)

    def set_limits(self, limits: Limits) -> None:
        """Take effect with the next plan. Raises ConfigError for limits beyond the ceilings.

        What runs is not ended: with fewer `max_num_seqs` nobody is admitted until enough have finished, with fewer
        `kv_blocks` as many as necessary are preempted; a lower `context_limit` is for those that arrive later.
        """
        self._limits = limits.within(self._resolved)
        self._kv.set_limits(limits.kv_blocks, limits.watermark_blocks, limits.charge_tokens)

    def plan(self, now_ns: int) -> StepPlan:
        """The next step. First the rows that need one position, then the rest, then whoever may join them."""
        if self._flight is not None:
            raise RuntimeError(f"plan was called while step {self._step} is out")
        self._step += 1
        self._ages.now_ns = now_ns
        roster, limits = self._roster, self._limits
        discarded = self._pool.take_discards()  # first of all: what this plan frees may be the source of a copy
        self._clear(now_ns)
        tokens = min(limits.max_num_batched_tokens, self._token_cap or limits.max_num_batched_tokens)
        ones, others = self._ready()
        joining = len(roster.waiting) > 0 and len(roster.running) < limits.max_num_seqs
        self._grant_ones(ones, policy.decode_budget(tokens, bool(others) or joining, self._step), now_ns)
        decoding = len(roster.next.grants)
        opened = [other for other in others if other.state is State.RUNNING]
        behind = max([other.computed for other in opened], default=0)
        doubling = self._resolved.context_doubling
        left = self._parts.prompts.budget(tokens - decoding, decoding, limits.prefill_chunk, behind, doubling)
        blocked = self._grant_others(left, opened, now_ns)
        while not roster.next.grants and any(blocked[:2]) and self._preempt_stalled(now_ns):
            blocked = self._grant_others(left, [], now_ns)
        plan = roster.next.build(self._step, self._kv.take_copies(), discarded, blocked)
        self._flight = roster.next.grants
        roster.next = PlanBuilder()
        return plan

    def commit(self, result: StepResult, now_ns: int) -> list[Output]:
        """Take a step's tokens. Returns the new tokens and the ends, those since the plan included."""
        flight = self._flight
        if flight is None or result.step != self._step:
            raise RuntimeError(f"step {result.step} was committed, but not planned last: that was {self._step}")
        self._flight = None
        self._ages.now_ns = now_ns
        outputs, self._ended = self._ended, []
        size = self._kv.block_size
        room = self._pool.capacity * size + 1  # tokens of one sequence: the newest has no KV yet
        running = State.RUNNING
        for sequence, piece, tokens, chances in zip(
            flight, flight.values(), result.tokens, _chances(result), strict=True
        ):
            if sequence.state is not running:  # cancelled while the step ran
                continue
            sequence.computed = computed = piece.start + piece.count
            if computed // size > sequence.named_blocks:
                self._kv.name_full(sequence)
            if young := not sequence.first_token_ns:
                sequence.prefill_chunks += 1
                sequence.watch.lap(now_ns, piece.count)
                if sequence.followers and sequence.pending <= 1:
                    self._roster.release_followers(sequence)
            logprobs, echoed = logprobs_of(sequence, piece.start, *chances) if chances else NO_LOGPROBS
            if not (tokens or echoed):
                pass
            elif (end := accept(sequence, tokens, room, now_ns)) is None:
                outputs.append(Output(sequence.request.id, tokens, now_ns, logprobs, echoed))
            else:
                outputs.append(
                    self._roster.finish(
                        sequence,
                        end.reason,
                        now_ns,
                        tokens=end.tokens,
                        logprobs=logprobs[: len(end.tokens)],
                        prompt_logprobs=echoed,
                        stop_token=end.stop_token,
                    )
                )
            if young or piece.start < sequence.recompute_until:
                sequence.watch.enter(sequence.stage_computing(), now_ns)
        if flight:
            self._granted_tokens += sum([piece.count for piece in flight.values()])
            self._token_cap *= 2
            if self._token_cap >= self._limits.max_num_batched_tokens:
                self._token_cap = 0
        return outputs

    def in_row(self, row: int) -> str:
        """The id of the request that runs in `row`; empty if none does any more."""
        sequence = self._roster.running.get(row)
        return sequence.request.id if sequence else ""

    def running_views(self) -> list[SequenceView]:
        """Those that hold a row."""
        return [sequence.view() for sequence in self._roster.running.values()]

    def retry_after_oom(self, plan: StepPlan, now_ns: int) -> None:
        """The plan that is out had no effect but on rows, tables and copies: its grants are granted again, to fewer
        rows and in smaller steps. The youngest is preempted, unless it is alone."""
        self._flight = None
        self._token_cap = max(1, plan.tokens // 2)
        if len(self._roster.running) > 1:
            self._roster.preempt(self._roster.youngest(), "oom", now_ns)

    def views(self) -> list[SequenceView]:
        """Every live choice, for a snapshot."""
        return [sequence.view() for sequence in self._roster.live.values()]

    def block_map(self) -> bytes:
        """One byte a block: 0 free, 1 cached, 2 active, 3 active and shared."""
        return self._pool.state_map()

    def block_ages(self) -> dict[str, bytes]:
        """Sampled ages of blocks since the last call (engine/kv/ages.py)."""
        return self._ages.drain()

    def reset_cache(self) -> int:
        """Forget every cached prefix. Returns how many blocks that frees."""
        return self._pool.forget()

    def sizes(self) -> dict[str, int]:
        """Entries of every queue and map in here that grows with use."""
        return {
            **self._roster.sizes(),
            **self._pool.sizes(),
            "prefixes": len(self._kv.prefixes),
            "unreported_ends": len(self._ended),
        }

    def state_facts(self) -> StateFacts:
        """Pool and queue now, for the step report. Stranded: blocks whose sequences wait for their readers."""
        size, pool, credit = self._kv.block_size, self._pool, self._credit
        tail = stranded = 0
        for sequence in self._roster.running.values():
            tail += max(0, len(sequence.blocks) * size - len(sequence.tokens))
            if sequence.unacked >= credit:
                stranded += len(sequence.blocks)
        return StateFacts(
            running=len(self._roster.running),
            waiting=self._roster.never_admitted,
            preempted=self._roster.preempted,
            kv_active=pool.active,
            kv_cached=pool.cached,
            kv_free=pool.free,
            kv_tail_slots=tail,
            kv_stranded_blocks=stranded,
        )

    def _refusal(self, sequence: Sequence) -> str:
        """Why this prompt can never be served under the limits in force; empty if it can."""
        limits, tokens = self._limits, sequence.prompt_len
        if tokens >= limits.context_limit:
            return f"a prompt of {tokens} tokens leaves no room for an answer: the limit is {limits.context_limit}"
        if not self._kv.fits_ever(sequence):
            room = limits.kv_blocks * self._kv.block_size
            return f"a prompt of {tokens} tokens does not fit into the KV cache, which holds {room}"
        return ""

    def _clear(self, now_ns: int) -> None:
        """Before anything is granted: end what is overdue, and give way to a limit that was lowered."""
        roster = self._roster
        for sequence in roster.overdue(now_ns):
            code = DeadlineExceeded.code
            self._ended.append(roster.finish(sequence, FinishReason.DEADLINE, now_ns, code=code))
        while self._pool.active > self._pool.capacity:
            roster.preempt(roster.youngest(), "limits", now_ns)

    def _ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences that may be granted something: those that need one position, and the others."""
        credit = self._credit
        ready = [one for one in self._roster.running.values() if one.unacked < credit]
        ones = [one for one in ready if len(one.tokens) - one.computed == 1]
        return ones, [one for one in ready if one.pending != 1] if len(ones) < len(ready) else []

    def _grant_ones(self, ones: list[Sequence], budget: int, now_ns: int) -> None:
        """One position each. If the budget is too small for all, those that got something go to the end."""
        size, builder, running = self._kv.block_size, self._roster.next, self._roster.running
        chosen = ones[:budget]
        full = [one for one in chosen if one.computed == len(one.blocks) * size]
        easy = [one for one in chosen if one.computed < len(one.blocks) * size] if full else chosen
        for sequence in full:  # first, since this may preempt others
            if sequence.state is State.RUNNING and self._make_room(sequence, now_ns):
                builder.grant(sequence, 1, (self._kv.grow(sequence),))
        builder.grant_last([one for one in easy if one.state is State.RUNNING] if full else easy)
        if len(ones) > budget:
            for sequence in builder.grants:
                running[sequence.row] = running.pop(sequence.row)

    def _make_room(self, sequence: Sequence, now_ns: int) -> bool:
        """See to it that one block is available, by preempting from the youngest on. False if `sequence` had to go
        itself: an older one never does for a younger one, unless it waits for its reader."""
        while self._pool.available < 1:
            victim = self._roster.youngest()
            if victim is sequence and self._preempt_stalled(now_ns):
                continue
            self._roster.preempt(victim, "kv", now_ns)
            if victim is sequence:
                return False
        return True

    def _preempt_stalled(self, now_ns: int) -> bool:
        """Take the blocks of one that cannot use them until its reader reads, if there is one."""
        victim = self._roster.youngest_stalled()
        if victim is None:
            return False
        self._roster.preempt(victim, "kv", now_ns)
        return True

    def _grant_others(self, tokens: int, opened: list[Sequence], now_ns: int) -> tuple[int, int, int]:
        """Share `tokens` among the partly computed and the newcomers. Returns how many still wait: for a row, for
        blocks, for tokens."""
        tokens, blocked = self._admit(tokens, opened, now_ns)
        shares = policy.share(tokens, [one.pending for one in opened], self._limits.max_partial_prefills)
        for sequence, count in zip(opened, shares, strict=True):
            if count:
                self._roster.next.grant(sequence, count)
                sequence.watch.enter(sequence.stage_computing(), now_ns)
            elif sequence.watch.stage == "prefill":
                sequence.watch.enter("prefill_wait", now_ns)
        return blocked

    def _admit(self, tokens: int, opened: list[Sequence], now_ns: int) -> tuple[int, tuple[int, int, int]]:
        """Let in whoever is next, while there is a row, blocks, and tokens of this step. A newcomer that can be
        computed whole is granted all of it; another joins `opened`. Returns the tokens left for those, and who waits.

        Nobody passes one that waits for a row or for blocks. One that is too large to be opened beside the others may
        be passed by smaller ones.
        """
        roster, kv, slots = self._roster, self._kv, self._limits.max_partial_prefills
        rows = self._parts.gate.rows(len(roster.running), len(roster.waiting), self._limits.max_num_seqs)
        floor = policy.floor_share(tokens, slots)
        room = tokens - floor * len(opened)
        skipped: dict[int, int] = {}  # size classes that may not begin now → how many wait in them
        reason = ""
        while (head := roster.waiting.head(skipped)) is not None:
            size, sequence = head
            if not kv.fits_ever(sequence):
                self._give_up(sequence, now_ns)
                continue
            if len(roster.running) >= rows:
                reason = "capacity"
                break
            if room <= 0:
                break
            found = kv.found(sequence)
            need = len(sequence.tokens) - found.tokens
            if need > room and not self._parts.prompts.may_open(need, [other.pending for other in opened], slots):
                skipped[size] = roster.waiting.count(size)
                continue
            if not kv.open(sequence, found, policy.headroom_blocks(len(roster.running), sequence.preemptions)):
                reason = "kv"
                break
            roster.enter(sequence, found, now_ns)
            if need <= room:
                roster.next.grant(sequence, need)
                room -= need
                tokens -= need
            else:
                opened.append(sequence)
                room -= floor
        return tokens, self._who_waits(reason, sum(skipped.values()))

    def _who_waits(self, reason: str, skipped: int) -> tuple[int, int, int]:
        """Split those never admitted by what they wait for: a row, blocks, or tokens of a step."""
        waiting = self._roster.never_admitted
        stopped = min(waiting, len(self._roster.waiting) - skipped) if reason else 0
        capacity, kv = (stopped, 0) if reason == "capacity" else (0, stopped)
        return capacity, kv, waiting - stopped

    def _give_up(self, sequence: Sequence, now_ns: int) -> None:
        """Its tokens do not fit any more, since the limit on blocks was lowered: what it has is its answer."""
        if sequence.output_len:
            self._ended.append(self._roster.finish(sequence, FinishReason.LENGTH, now_ns))
            return
        why = self._refusal(sequence)
        self._ended.append(self._roster.finish(sequence, FinishReason.ERROR, now_ns, code=ContextTooLong.code, why=why))


def _chances(result: StepResult) -> Iterable[tuple[Any, ...]]:
    """For every slice its log-probabilities, sampled and of the prompt; empty if the step has none at all."""
    nothing = ((),) * len(result.tokens)
    if result.logprobs or result.prompt_logprobs:
        return zip(result.logprobs or nothing, result.prompt_logprobs or nothing, strict=True)
    return nothing
