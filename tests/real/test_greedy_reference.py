"""Greedy text over HTTP equals transformers' on the same fp32 weights, alone and 16 at once.

The reference reads the same GGUF with transformers' own loader, so that our dequantization, names and permutations are
checked too. It is teacher-forced: one forward over prompt + our tokens gives the reference's choice at every position
under the same prefix, which is what its greedy generation would have chosen as long as no token differed; comparison
of a prompt ends where one does.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from daemon import paths
from daemon.library import Library
from tests.served import Served

TOKENS = 64
GAP = 1e-3
SUBJECTS = [
    "Name three rivers.",
    "Write a short poem about the sea.",
    "What is the capital of France?",
    "Explain photosynthesis to a child.",
    "List five uses of a paper clip.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "What is 17 + 25?",
    "Describe a sunset in one paragraph.",
    "Who wrote Romeo and Juliet?",
    "What does a compiler do?",
    "Suggest a name for a cat.",
    "How do I boil an egg?",
    "Summarise the story of Icarus.",
    "What is the largest planet?",
    "Write a haiku about rain — naïve café style 🌧.",
    "Tell me a joke about programmers.",
    "How far is the moon?",
    "What should I pack for a trip to the mountains in winter, and why does each thing matter?",
]


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    path = Library(paths.cache_dir(), lambda *_: None).pull("smollm2")
    model: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


def generate(served: Served, subject: str) -> tuple[list[int], list[int]]:
    """(prompt tokens, generated tokens) of one greedy chat completion."""
    message = [{"role": "user", "content": subject}]
    status, tokens = served.post("/tokenize", {"model": "smollm2", "messages": message})
    assert status == 200, tokens
    body = {"model": "smollm2", "prompt": tokens["tokens"], "max_tokens": TOKENS, "temperature": 0, "logprobs": 0}
    status, answer = served.post("/v1/completions", {**body, "return_token_ids": True})
    assert status == 200, answer
    return tokens["tokens"], answer["choices"][0]["token_ids"]


@torch.inference_mode()
def divergence(model: LlamaForCausalLM, prompt: list[int], ours: list[int]) -> float | None:
    """None if every token is the reference's choice, else the reference's top-2 gap where the first one is not."""
    logits = model(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1 : -1].float()
    for position, token in enumerate(ours):
        best = logits[position].topk(2)
        if int(best.indices[0]) != token:
            return float(best.values[0] - best.values[1])
    return None


def one_at_a_time(call: Callable[[str], Any]) -> list[Any]:
    return [call(subject) for subject in SUBJECTS]


def sixteen_at_once(call: Callable[[str], Any]) -> list[Any]:
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(call, SUBJECTS))


@pytest.mark.timeout(400)  # 20 x 64 tokens one after the other, and the reference's loading
@pytest.mark.parametrize("run", [one_at_a_time, sixteen_at_once])
def test_greedy_equals_transformers(
    served: Served, reference: LlamaForCausalLM, run: Callable[[Callable[[str], Any]], list[Any]]
) -> None:
    results = run(lambda subject: generate(served, subject))
    gaps = [divergence(reference, prompt, ours) for prompt, ours in results]
    diverged = [gap for gap in gaps if gap is not None]
    assert len(diverged) <= 1, f"reference's top-2 gaps at the divergences: {diverged}"
    assert all(gap < GAP for gap in diverged)
    # a run that ends at once would compare nothing
    assert sum(len(ours) for _, ours in results) > 20 * TOKENS // 4
