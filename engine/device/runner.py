"""TorchRunner: the device plane: applies a plan's diff, runs the model, samples, and gives the result.

Owns the model, the store, the rows and the sampler, and the one place where torch's allocation failures become
`OutOfMemory`. It must not know the scheduler: a StepPlan comes in, a StepResult goes out (engine/plan.py).
"""

import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor

from engine.device import batch as batches
from engine.device.meter import Meter
from engine.device.rows import Rows
from engine.device.sample import Draw, Sampler, logprob_of
from engine.errors import EngineFault, OutOfMemory
from engine.kernels.ops import Span
from engine.kernels.threads import one_thread
from engine.kv.store import KVStore
from engine.layers.decoder import Decoder
from engine.plan import SeqSlice, StepPlan, StepResult
from engine.request import TokenLogprob

_LOGPROB_CHUNK = 32  # prompt positions whose logits exist at once


class TorchRunner:
    """engine.plan.Runner on torch. `rope`: cos and sin tables by position."""

    depth = 1

    def __init__(
        self, model: Decoder, store: KVStore, rows: Rows, sampler: Sampler, rope: tuple[Tensor, Tensor], meter: Meter
    ) -> None:
        self._model = model
        self._store = store
        self._rows = rows
        self._sampler = sampler
        self._rope = rope
        self._done: deque[StepResult] = deque()
        self._clock = _clock(rows.tokens.device)
        self._tick: Callable[[str], None] = lambda phase: None
        self._meter = meter
        self._phase = ""
        self._row: int | None = None  # whose memory is asked for now, if it is one row's

    @property
    def workspace_bytes(self) -> int:
        """What lives as long as the runner beside weights and KV: the rows and the tables of positions."""
        return self._rows.bytes + sum(table.numel() * table.element_size() for table in self._rope)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """See engine.plan.Runner."""
        self._meter.before_step()
        with self._explained(), translated():
            self._at("rows")
            for row in plan.released:
                self._sampler.end(row)
            for init in plan.admitted:
                self._sampler.begin(init)
            self._rows.apply(plan)  # not metered: blocks given back meanwhile would count as what the step needed
            if not plan.slices:
                self._done.append(StepResult(step=plan.step, tokens=()))
                return
            with self._meter.step():
                result = self._run(plan)
            self._done.append(replace(result, memory_peak_bytes=self._meter.peak_bytes))

    def collect(self) -> StepResult:
        """See engine.plan.Runner."""
        if not self._done:
            raise EngineFault("collect without launch")
        return self._done.popleft()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """An OutOfMemory leaves with what is known of the moment: it is gone once the step's tensors are."""
        try:
            yield
        except OutOfMemory as error:
            error.phase, error.row = self._phase, self._row
            with suppress(MemoryError, OSError):  # measuring takes a little memory too
                error.readings = self._meter.readings()
            raise

    def _at(self, phase: str, row: int | None = None) -> None:
        self._phase, self._row = phase, row
        self._tick(phase)

    def tell(self, tick: Callable[[str], None]) -> None:
        """See engine.plan.Runner."""
        self._tick = tick

    def close(self) -> None:
        self._done.clear()

    def _run(self, plan: StepPlan) -> StepResult:
        begun_ns = self._clock()
        batch = batches.build(plan.slices, self._rows, self._rope)
        hidden = self._model.hidden(batch, self._store, lambda: self._at("forward"))
        ends = [
            (index, span.begin + span.count - 1)
            for index, (piece, span) in enumerate(zip(plan.slices, batch.spans, strict=True))
            if piece.sample
        ]
        logits = None
        if ends:
            last = [end for _, end in ends]
            chosen = (
                hidden if last == list(range(hidden.shape[0])) else hidden[torch.tensor(last, device=hidden.device)]
            )
            self._at("logits")
            logits = self._model.logits(chosen)
        forward_ns = self._clock()
        tokens: list[tuple[int, ...]] = [()] * len(plan.slices)
        logprobs: list[tuple[TokenLogprob, ...]] = [()] * len(plan.slices)
        prompt_logprobs = self._prompt_logprobs(plan.slices, batch.spans, hidden)
        if logits is not None:  # last, since it alone changes what rows remember: a failed step can be granted again
            self._at("sample")
            with one_thread():
                self._sample(plan.slices, [index for index, _ in ends], logits, tokens, logprobs)
        return StepResult(
            step=plan.step,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs) if any(logprobs) else (),
            prompt_logprobs=prompt_logprobs,
            forward_ns=forward_ns - begun_ns,
            sample_ns=self._clock() - forward_ns,
        )

    def _sample(
        self,
        slices: tuple[SeqSlice, ...],
        which: list[int],
        logits: Tensor,
        tokens: list[tuple[int, ...]],
        logprobs: list[tuple[TokenLogprob, ...]],
    ) -> None:
        """Draw for the slices `which`, write the tokens into their rows and into the result's columns."""
        draws = []
        for index in which:
            piece = slices[index]
            row = self._rows[piece.row]
            draws.append(Draw(piece.row, piece.start + piece.count, row.prompt_len, row.sampling))
        drawn, details = self._sampler.sample(logits, draws)
        rows = torch.tensor([draw.row for draw in draws], device=logits.device)
        positions = torch.tensor([draw.position for draw in draws], device=logits.device)
        self._rows.tokens[rows, positions] = torch.tensor(drawn, device=logits.device)
        for index, token, detail in zip(which, drawn, details, strict=True):
            tokens[index] = (token,)
            if detail is not None:
                logprobs[index] = (detail,)

    def _prompt_logprobs(
        self, slices: tuple[SeqSlice, ...], spans: list[Span], hidden: Tensor
    ) -> tuple[tuple[TokenLogprob, ...], ...]:
        """For each slice whose request asks: what the model thought of the prompt tokens at start + 1 … start + count.
        A few positions at a time, so that memory does not grow with vocabulary x prompt."""
        result: list[tuple[TokenLogprob, ...]] = []
        for piece, span in zip(slices, spans, strict=True):
            row = self._rows[piece.row]
            best = row.sampling.prompt_logprobs
            count = 0 if best is None else min(piece.count, row.prompt_len - 1 - piece.start)
            entries: list[TokenLogprob] = []
            for offset in range(0, max(0, count), _LOGPROB_CHUNK):
                self._at("prompt_logprobs", piece.row)
                chunk = min(_LOGPROB_CHUNK, count - offset)
                logits = self._model.logits(hidden[span.begin + offset : span.begin + offset + chunk])
                first = piece.start + offset + 1
                targets = self._rows.tokens[piece.row, first : first + chunk].tolist()
                entries += [logprob_of(logits[i], token, best or 0) for i, token in enumerate(targets)]
            result.append(tuple(entries))
        return tuple(result) if any(result) else ()


@contextmanager
def translated() -> Iterator[None]:
    """Torch's failures to allocate, on any device, as OutOfMemory; its other errors as EngineFault."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(error) from error
    except MemoryError as error:
        raise _out_of_memory(error) from error
    except RuntimeError as error:
        if re.search(_SHORT_OF_MEMORY, str(error)):
            raise _out_of_memory(error) from error
        raise EngineFault(f"the step failed: {error}") from error


# The CPU's allocator has no class of its own; neither have some of CUDA's libraries. oneDNN says no more than that it
# has no primitive when it cannot map the memory for one: for shapes that it served before, that is the only reason.
_SHORT_OF_MEMORY = (
    r"DefaultCPUAllocator|not enough memory|can't allocate memory|CUDA out of memory|ALLOC_FAILED|bad_alloc"
    r"|could not (create|execute) a primitive"
)
_SIZES = {"": 1, "bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _out_of_memory(error: BaseException) -> OutOfMemory:
    text = str(error)
    asked = re.search(r"allocate ([\d.]+) (bytes|KiB|MiB|GiB)", text)
    free = re.search(r"of which ([\d.]+) (bytes|KiB|MiB|GiB) is free", text)
    sizes = [int(float(m[1]) * _SIZES[m[2]]) if m else 0 for m in (asked, free)]
    return OutOfMemory(
        f"the device could not allocate {f'{sizes[0]} bytes' if sizes[0] else 'memory'}",
        "lower --max-num-batched-tokens or --max-num-seqs",
        requested_bytes=sizes[0],
        free_bytes=sizes[1],
    )


def _clock(device: torch.device) -> Callable[[], int]:
    """Host time, after the device has finished what was asked of it. A step's tokens are read back anyway, so waiting
    here costs nothing at depth 1."""
    if device.type != "cuda":
        return time.monotonic_ns

    def synchronised() -> int:
        torch.cuda.synchronize(device)
        return time.monotonic_ns()

    return synchronised
