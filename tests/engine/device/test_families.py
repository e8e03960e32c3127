"""Every family against transformers on the same fp32 weights: logits within 1e-4, greedy tokens identical; whole, in
chunks, in company, over scattered blocks, from a cached prefix, after a copy on write."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.device import batch as batches
from engine.device.runner import TorchRunner
from engine.device.start import start
from engine.plan import SeqSlice, StepPlan
from tests.fakes.steps import BLOCK, Driver, prompt
from tests.fakes.tiny import prepare_tiny, write_tiny

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama-gqa", "llama", {}),
    ("llama-mqa-tied", "llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("llama-mha-biased", "llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    ("llama3-rope", "llama", {"rope_parameters": LLAMA3}),
    ("llama-linear-rope", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ("mistral-window", "mistral", {"sliding_window": 9}),
    ("mistral-full", "mistral", {"sliding_window": None}),
    ("qwen2", "qwen2", {}),
    ("qwen2-window", "qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    ("qwen3", "qwen3", {}),
]


@dataclass(frozen=True)
class Pair:
    """A runner of ours and transformers' model with the same weights."""

    runner: TorchRunner
    reference: PreTrainedModel

    def logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens])).logits[0]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="module", params=CASES, ids=[case[0] for case in CASES])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, family, overrides = request.param
    directory: Path = tmp_path_factory.mktemp(name)
    reference = write_tiny(family, directory, **overrides)
    manifest = prepare_tiny(directory, reference)
    config = EngineConfig(model_dir=str(directory), max_num_seqs=4, max_num_batched_tokens=64, block_size=BLOCK)
    return Pair(start(config, manifest, directory, lambda *_: None).runner, reference)


def test_logits_are_the_references(pair: Pair) -> None:
    tokens = prompt(1, 37)
    driver = Driver(pair.runner, list(range(100)))
    runner = pair.runner
    with torch.inference_mode():
        init = driver.init(0, tokens)
        piece = driver.slice(0, 0, 37)
        runner._rows.apply(StepPlan(step=1, admitted=(init,), slices=(piece,)))
        hidden = runner._model.hidden(batches.build((piece,), runner._rows, runner._rope), runner._store)
        ours = runner._model.logits(hidden)
    driver.release(0)
    torch.testing.assert_close(ours, pair.logits(tokens), atol=1e-4, rtol=0)


def test_whole_prefill_and_decode(pair: Pair) -> None:
    tokens = prompt(2, 21)
    driver = Driver(pair.runner, list(range(50)))
    first = driver.step((0, 0, 21), admitted=(driver.init(0, tokens),))[0]
    ours = driver.decode(0, first, 21, 24)
    driver.release(0)
    assert ours == pair.greedy(tokens, 24)


def test_chunks_over_scattered_blocks(pair: Pair) -> None:
    tokens = prompt(3, 26)
    scattered = torch.randperm(60, generator=torch.Generator().manual_seed(3)).tolist()
    driver = Driver(pair.runner, scattered)
    driver.step((0, 0, 5), admitted=(driver.init(0, tokens),))
    driver.step((0, 5, 1))
    driver.step((0, 6, 13))
    first = driver.step((0, 19, 7))[0]
    ours = driver.decode(0, first, 26, 20)
    driver.release(0)
    assert ours == pair.greedy(tokens, 20)


def test_company_changes_nothing(pair: Pair) -> None:
    """A decode, a chunk and a whole prompt in one step."""
    prompts = [prompt(4, 9), prompt(5, 18), prompt(6, 30)]
    driver = Driver(pair.runner, list(range(90)))
    a = driver.step((0, 0, 9), admitted=(driver.init(0, prompts[0]),))[0]
    mixed = driver.step((0, 9, 1), (1, 0, 11), admitted=(driver.init(1, prompts[1]),))
    last = driver.step((0, 10, 1), (1, 11, 7), (2, 0, 30), admitted=(driver.init(2, prompts[2]),))
    tokens = {0: [a, mixed[0], last[0]], 1: [last[1]], 2: [last[2]]}
    at = {0: 9, 1: 18, 2: 30}
    for _ in range(8):
        got = driver.step(*((row, at[row] + len(tokens[row]) - 1, 1) for row in tokens))
        for row, token in got.items():
            tokens[row].append(token)
    driver.release(0, 1, 2)
    for row in tokens:
        assert tokens[row] == pair.greedy(prompts[row], len(tokens[row]))


def test_cached_prefix_and_copy_on_write(pair: Pair) -> None:
    """Row 1 starts on row 0's blocks: two shared whole, the third copied before it is written."""
    shared = prompt(7, 11)
    driver = Driver(pair.runner, list(range(80)))
    first = driver.step((0, 0, 11), admitted=(driver.init(0, shared),))[0]
    other = [*shared[:10], (shared[10] + 1) % 320 or 1, *prompt(8, 4)]
    init = driver.init(1, other, blocks=(0, 1, 2))
    piece = SeqSlice(row=1, start=10, count=5, new_blocks=(70,), replaced_blocks=((2, 60),), sample=True)
    pair.runner.launch(StepPlan(step=1, admitted=(init,), copies=((2, 60),), slices=(piece,)))
    second = pair.runner.collect().tokens[0][0]
    driver.held[1] = 4
    ours = [driver.decode(0, first, 11, 9), driver.decode(1, second, 15, 9)]
    driver.release(0, 1)
    assert ours == [pair.greedy(shared, 9), pair.greedy(other, 9)]
