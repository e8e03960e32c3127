"""FakeRunner: a device without tensors that checks everything a device relies on.

Its "KV" of a position is a hash of all tokens up to it, so a wrong, shared, stale or overwritten block is *detected*
when it is read, and its next token is a function of the whole history, so outputs show whether chunking, caching or
preemption changed anything. Torch-free. Anything that a device could not survive is an AssertionError.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.errors import OutOfMemory
from engine.plan import RowInit, SeqSlice, StepPlan, StepResult
from engine.request import SamplingParams, TokenLogprob

VOCABULARY = 1009
_ROOT = 7


def chain(before: int, token: int) -> int:
    """The hash of a history that ends in `token`; the same in every process."""
    return hash((before, token))


def next_token(history: int, sampling: SamplingParams, outputs: int) -> int:
    """The token after a history: of greedy requests the same, else by seed. Stop tokens wait for `min_tokens`."""
    token = hash((history, 0 if sampling.greedy else 1 + sampling.seed)) % VOCABULARY
    if outputs < sampling.min_tokens:
        while token in sampling.stop_token_ids:
            token = (token + 1) % VOCABULARY
    return token


def lone_run(prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
    """What a request alone on a perfect machine would answer (its stop token excluded)."""
    history = _ROOT
    for token in prompt:
        history = chain(history, token)
    answer: list[int] = []
    while len(answer) < sampling.max_tokens:
        token = next_token(history, sampling, len(answer))
        if token in sampling.stop_token_ids and len(answer) >= sampling.min_tokens:
            break
        answer.append(token)
        history = chain(history, token)
    return tuple(answer)


@dataclass(slots=True)
class _Row:
    request_id: str
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    blocks: list[int]
    history: list[int]  # hash of tokens[0..p] for every p
    computed: int = -1  # -1 = nothing yet: the first slice says where it begins


@dataclass(slots=True)
class FakeRunner:
    """`oom(plan)` makes the launch of a plan fail, after its diff was applied, as on a device. `cost_ns(plan)` is what
    a step claims to have taken. `written` counts positions computed, by request id."""

    block_size: int = 16
    depth: int = 1
    oom: Callable[[StepPlan], bool] | None = None
    cost_ns: Callable[[StepPlan], int] | None = None
    rows: dict[int, _Row] = field(default_factory=dict)
    kv: dict[int, list[int | None]] = field(default_factory=dict)  # block → hash by slot
    written: dict[str, int] = field(default_factory=dict)
    _results: deque[StepResult] = field(default_factory=deque)

    def launch(self, plan: StepPlan) -> None:
        assert len(self._results) < self.depth, "more steps in flight than the depth allows"
        self._apply(plan)
        if self.oom is not None and self.oom(plan):
            raise OutOfMemory(f"planted: {plan.tokens} tokens", requested_bytes=1 << 20)
        sampled = [self._compute(piece) for piece in plan.slices]
        asked = any(self.rows[piece.row].sampling.logprobs is not None for piece in plan.slices)
        asked_prompt = any(self.rows[piece.row].sampling.prompt_logprobs is not None for piece in plan.slices)
        self._results.append(
            StepResult(
                step=plan.step,
                tokens=tuple(sampled),
                logprobs=tuple(tuple(map(_logprob, tokens)) for tokens in sampled) if asked else (),
                prompt_logprobs=tuple(map(self._prompt_logprobs, plan.slices)) if asked_prompt else (),
                forward_ns=self.cost_ns(plan) if self.cost_ns else 0,
            )
        )

    def collect(self) -> StepResult:
        return self._results.popleft()

    def tell(self, tick: Callable[[str], None]) -> None:
        """It is always quick."""

    def close(self) -> None:
        self.rows.clear()
        self.kv.clear()

    def _apply(self, plan: StepPlan) -> None:
        """The diff, in the order that StepPlan promises; it stays applied if computing fails."""
        for number in plan.released:
            assert number in self.rows, f"row {number} is released, but nobody has it"
            del self.rows[number]
        for init in plan.admitted:
            self._admit(init)
        for block in plan.discarded:
            assert all(block not in row.blocks for row in self.rows.values() if row.computed >= 0)
            self.kv.pop(block, None)
        for source, target in plan.copies:
            assert source in self.kv, f"block {source} is copied, but was never written"
            self.kv[target] = list(self.kv[source])
        granted = [piece.row for piece in plan.slices]
        assert len(granted) == len(set(granted)), "a row has two slices in one step"
        for piece in plan.slices:
            row = self.rows[piece.row]
            for index, block in piece.replaced_blocks:
                row.blocks[index] = block
            row.blocks += piece.new_blocks
            assert len(set(row.blocks)) == len(row.blocks), f"a table of {row.request_id} has a block twice"

    def _admit(self, init: RowInit) -> None:
        assert init.row not in self.rows, f"row {init.row} is given to {init.request_id}, but is taken"
        history, before = [], _ROOT
        for token in init.tokens:
            before = chain(before, token)
            history.append(before)
        self.rows[init.row] = _Row(
            init.request_id, list(init.tokens), init.prompt_len, init.sampling, list(init.blocks), history
        )

    def _compute(self, piece: SeqSlice) -> tuple[int, ...]:
        row = self.rows[piece.row]
        size, end = self.block_size, piece.start + piece.count
        if row.computed < 0:
            row.computed = piece.start
        who = f"{row.request_id} in row {piece.row}"
        assert piece.count > 0, f"an empty slice for {who}"
        assert piece.start == row.computed, f"{who} is at {row.computed}, not at {piece.start}"
        assert end <= len(row.tokens), f"{who} has {len(row.tokens)} tokens, but {end} are to be computed"
        assert end <= len(row.blocks) * size, f"{who} has {len(row.blocks)} blocks, too few for {end} positions"
        assert piece.sample == (end == len(row.tokens)), f"{who} is sampled too early or not at all"
        for position in range(piece.start, end):
            slots = self.kv.setdefault(row.blocks[position // size], [None] * size)
            slots[position % size] = row.history[position]
        for index in range(-(-end // size)):
            want = row.history[index * size : min(end, (index + 1) * size)]
            have = self.kv.get(row.blocks[index], [])[: len(want)]
            assert have == want, f"{who} reads a wrong KV in block {row.blocks[index]} (number {index} of its table)"
        row.computed = end
        self.written[row.request_id] = self.written.get(row.request_id, 0) + piece.count
        if not piece.sample:
            return ()
        token = next_token(row.history[-1], row.sampling, len(row.tokens) - row.prompt_len)
        row.tokens.append(token)
        row.history.append(chain(row.history[-1], token))
        return (token,)

    def _prompt_logprobs(self, piece: SeqSlice) -> tuple[TokenLogprob, ...]:
        row = self.rows[piece.row]
        if row.sampling.prompt_logprobs is None:
            return ()
        end = min(piece.start + piece.count + 1, row.prompt_len)
        return tuple(map(_logprob, row.tokens[piece.start + 1 : end]))


def _logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0 - token / VOCABULARY, 1)
