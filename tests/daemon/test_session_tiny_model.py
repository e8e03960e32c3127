"""The real engine process (`python -m engine.process`) with a tiny random Llama, against transformers on the same
weights: whole way from Request to Output, several at once, and again after a kill."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.budget import memory_plan
from engine.config import EngineConfig
from engine.errors import DoesNotFit
from engine.request import FinishReason
from telemetry.events import EngineEnded, StepReport
from tests.fakes.sessions import read, request, session
from tests.fakes.tiny import prepare_tiny, write_tiny

PROMPTS = [tuple(torch.randint(1, 257, (n,), generator=torch.Generator().manual_seed(n)).tolist()) for n in (5, 33, 70)]
NEW_TOKENS = 12

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[list[int]]]]:
    """The prepared directory, and the reference's greedy answers."""
    directory = tmp_path_factory.mktemp("tiny")
    reference = write_tiny("llama", directory)
    prepare_tiny(directory, reference)
    answers = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            tokens = torch.tensor([prompt])
            for _ in range(NEW_TOKENS):
                tokens = torch.cat([tokens, reference(tokens).logits[:, -1:].argmax(-1)], dim=1)
        answers.append(tokens[0, len(prompt) :].tolist())
    yield directory, answers


async def test_greedy_tokens_equal_the_references_also_after_a_kill(
    tmp_path: Path, model: tuple[Path, list[list[int]]]
) -> None:
    directory, answers = model
    config = EngineConfig(model_dir=str(directory), threads=1, max_num_batched_tokens=48)
    async with session(tmp_path, config=config, real=True, seconds=60) as running:
        for life in range(2):
            view = running.session.view()
            assert view.pid is not None
            assert view.resolved is not None
            assert sum(row.bytes for row in memory_plan(view.resolved)) == view.resolved.memory_limit_bytes
            streams = [
                running.session.submit([request(f"{life}-{i}", NEW_TOKENS, prompt)])[0]
                for i, prompt in enumerate(PROMPTS)
            ]
            for outputs, answer in zip(await asyncio.gather(*map(read, streams)), answers, strict=True):
                assert [token for output in outputs for token in output.tokens] == answer
                assert outputs[-1].finish is FinishReason.LENGTH
            if life == 0:
                os.kill(view.pid, signal.SIGKILL)
                await running.until(lambda: bool(running.of(EngineEnded)))
                await running.until(lambda: running.session.view().state == "ready", 60)
        await running.until(lambda: any(report.forward_ns for report in running.of(StepReport)))
        reports = running.of(StepReport)
        assert max(sum((r.prefill_tokens, r.decode_tokens)) for r in reports if r.merged == 1) <= 48


async def test_a_memory_limit_too_small_for_the_context_is_refused_before_anything_is_taken(
    tmp_path: Path, model: tuple[Path, list[list[int]]]
) -> None:  # case 10, by way of the real process
    config = EngineConfig(model_dir=str(model[0]), threads=1, max_model_len=256, memory_limit_bytes=64 << 20)
    async with session(tmp_path, config=config, real=True, wait=False) as running:
        async with asyncio.timeout(60):
            with pytest.raises(DoesNotFit, match="fit into"):
                await running.session.wait_ready()
        assert running.session.view().state == "failed"
