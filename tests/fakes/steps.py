"""Hand-made plans for a runner: what the scheduler would say, said by a test."""

from typing import Any

import torch

from engine.device.runner import TorchRunner
from engine.plan import RowInit, SeqSlice, StepPlan, StepResult
from engine.request import SamplingParams

BLOCK = 4


def prompt(seed: int, count: int) -> list[int]:
    return torch.randint(1, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Driver:
    """Hand-made plans for rows of one runner: blocks are given in the order the test says."""

    def __init__(self, runner: TorchRunner, blocks: list[int]) -> None:
        self.runner = runner
        self.blocks = iter(blocks)
        self.held: dict[int, int] = {}
        self.result: StepResult | None = None  # of the last step
        self.known: dict[int, int] = {}  # length of each row's prompt

    def step(self, *grants: tuple[int, int, int], admitted: tuple[RowInit, ...] = ()) -> dict[int, int]:
        """Grants are (row, start, count). Gives row → token for those that reach the end of what is known."""
        slices = tuple(self.slice(*grant) for grant in grants)
        self.runner.launch(StepPlan(step=1, slices=slices, admitted=admitted))
        result = self.result = self.runner.collect()
        return {piece.row: tokens[0] for piece, tokens in zip(slices, result.tokens, strict=True) if tokens}

    def slice(self, row: int, start: int, count: int) -> SeqSlice:
        needed = -(-(start + count) // BLOCK) - self.held.get(row, 0)
        new = tuple(next(self.blocks) for _ in range(max(0, needed)))
        self.held[row] = self.held.get(row, 0) + len(new)
        sample = start + count >= self.known[row]
        return SeqSlice(row=row, start=start, count=count, new_blocks=new, sample=sample)

    def init(self, row: int, tokens: list[int], blocks: tuple[int, ...] = (), **params: Any) -> RowInit:
        self.held[row] = len(blocks)
        self.known[row] = len(tokens)
        sampling = SamplingParams(**{"max_tokens": 64, "temperature": 0.0, **params})
        return RowInit(row, f"r{row}", tuple(tokens), len(tokens), sampling, blocks)

    def release(self, *rows: int) -> None:
        self.runner.launch(StepPlan(step=1, slices=(), released=rows))
        self.runner.collect()

    def decode(self, row: int, first: int, at: int, count: int) -> list[int]:
        tokens = [first]
        while len(tokens) < count:
            tokens.append(self.step((row, at + len(tokens) - 1, 1))[row])
        return tokens
