"""PlanBuilder: the step under way, from the moment the step before was handed out until `build`.

Collects rows that begin, end and advance, and why. It must not decide anything (engine/scheduler.py does) and never
outlives its step. Enter at `grant` and `build`.
"""

from engine.plan import Admission, PlanWhy, Preemption, RowInit, SeqSlice, StepPlan
from engine.sequence import Sequence


class PlanBuilder:
    """What happens between two steps (a cancelled request's row, a preemption after a failure) is collected here too,
    and reaches the device with the next plan."""

    def __init__(self) -> None:
        self.grants: dict[Sequence, SeqSlice] = {}
        self._inits: list[RowInit] = []
        self._admissions: list[Admission] = []
        self._released: list[int] = []
        self._preempted: list[Preemption] = []

    @property
    def pending(self) -> bool:
        """Whether the device has something to hear even if no position is granted."""
        return bool(self._released)

    def grant(self, sequence: Sequence, count: int, new_blocks: tuple[int, ...] = ()) -> None:
        """The next `count` positions; a token is sampled if that reaches the end of what is known."""
        start = sequence.computed
        sample = start + count == len(sequence.tokens)
        self.grants[sequence] = SeqSlice(sequence.row, start, count, new_blocks, sample)

    def grant_last(self, sequences: list[Sequence]) -> None:
        """The same for many at once that have blocks for the one position that they need."""
        self.grants.update(
            zip(sequences, SeqSlice.one_each([(one.row, one.computed) for one in sequences]), strict=True)
        )

    def admit(self, sequence: Sequence, admission: Admission) -> None:
        self._inits.append(
            RowInit(
                row=sequence.row,
                request_id=sequence.request.id,
                tokens=tuple(sequence.tokens),
                prompt_len=sequence.prompt_len,
                sampling=sequence.request.sampling,
                blocks=tuple(sequence.blocks),
            )
        )
        self._admissions.append(admission)

    def release(self, sequence: Sequence) -> None:
        """Its row ends, and with it what it was granted in this step."""
        self._released.append(sequence.row)
        self.grants.pop(sequence, None)

    def preempted(self, preemption: Preemption) -> None:
        self._preempted.append(preemption)

    def build(
        self,
        step: int,
        copies: tuple[tuple[int, int], ...],
        discarded: tuple[int, ...],
        waiting: tuple[int, int, int],
    ) -> StepPlan:
        """The plan. `waiting`: how many wait for capacity, for KV blocks, and for tokens of a step."""
        return StepPlan(
            step=step,
            slices=tuple(self.grants.values()),
            admitted=tuple(self._inits),
            released=tuple(self._released),
            copies=copies,
            discarded=discarded,
            why=self._why(waiting),
        )

    def _why(self, waiting: tuple[int, int, int]) -> PlanWhy:
        """Count the grants by kind: what was computed before is recomputation; of the rest, what comes before the
        first token is prefill and what comes after it is decode."""
        rest = [
            (sequence, piece)
            for sequence, piece in self.grants.items()
            if not sequence.first_token_ns or piece.start < sequence.recompute_until
        ]
        context_tokens = sum([piece.start + piece.count for piece in self.grants.values()])
        decode_tokens = sum([piece.count for piece in self.grants.values()])
        prefill_tokens = recompute_tokens = 0
        for sequence, piece in rest:
            again = max(0, min(piece.count, sequence.recompute_until - piece.start))
            recompute_tokens += again
            if not sequence.first_token_ns:
                prefill_tokens += piece.count - again
        decode_tokens -= recompute_tokens + prefill_tokens
        capacity, kv, budget = waiting
        return PlanWhy(
            admitted=tuple(self._admissions),
            preempted=tuple(self._preempted),
            waiting_capacity=capacity,
            waiting_kv=kv,
            waiting_budget=budget,
            prefill_rows=len(rest),
            decode_rows=len(self.grants) - len(rest),
            prefill_tokens=prefill_tokens,
            decode_tokens=decode_tokens,
            recompute_tokens=recompute_tokens,
            context_tokens=context_tokens,
        )
