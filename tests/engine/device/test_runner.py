"""The runner beyond greedy decoding: log-probabilities against transformers', seeds in company, rows used again, and
what becomes of a failed allocation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.device.runner import TorchRunner, translated
from engine.device.start import start
from engine.errors import EngineFault, OutOfMemory
from engine.plan import StepPlan
from telemetry.residency import heap
from tests.fakes.steps import BLOCK, Driver, prompt
from tests.fakes.tiny import prepare_tiny, write_tiny


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("runner")
    return directory, write_tiny("llama", directory)


@pytest.fixture(scope="module")
def runner(reference: tuple[Path, PreTrainedModel]) -> TorchRunner:
    directory, model = reference
    manifest = prepare_tiny(directory, model)
    config = EngineConfig(model_dir=str(directory), max_num_seqs=4, max_num_batched_tokens=128, block_size=BLOCK)
    return start(config, manifest, directory, lambda *_: None).runner


def theirs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)


def test_logprobs_are_of_the_models_own_distribution(
    runner: TorchRunner, reference: tuple[Path, PreTrainedModel]
) -> None:
    """Whatever temperature and penalties did to the choice."""
    tokens, driver = prompt(1, 13), Driver(runner, list(range(40)))
    asked = {"logprobs": 3, "temperature": 1.7, "presence_penalty": 1.0, "seed": 5}
    driver.step((0, 0, 13), admitted=(driver.init(0, tokens, **asked),))
    for _ in range(4):
        assert driver.result is not None
        (found,) = driver.result.logprobs[0]
        expected = theirs(reference[1], tokens)[-1]
        best = expected.topk(3)
        assert found.logprob == pytest.approx(float(expected[found.token]), abs=1e-4)
        assert found.rank == int((expected > expected[found.token]).sum()) + 1
        assert [token for token, _ in found.top] == best.indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        tokens.append(found.token)
        driver.step((0, len(tokens) - 1, 1))
    driver.release(0)


@pytest.mark.parametrize("chunks", [[75], [40, 1, 34]], ids=str)
def test_prompt_logprobs_whole_and_in_chunks(
    runner: TorchRunner, reference: tuple[Path, PreTrainedModel], chunks: list[int]
) -> None:
    tokens, driver = prompt(2, 75), Driver(runner, list(range(60)))
    other = driver.init(1, prompt(3, 6))  # in company of one that does not ask
    admitted: tuple[Any, ...] = (driver.init(0, tokens, prompt_logprobs=2), other)
    found, begin = [], 0
    for count in chunks:
        grants = [(0, begin, count)] + ([(1, 0, 6)] if not begin else [])
        driver.step(*grants, admitted=admitted)
        assert driver.result is not None
        found += driver.result.prompt_logprobs[0]
        assert all(not entries for entries in driver.result.prompt_logprobs[1:])
        admitted, begin = (), begin + count
    driver.release(0, 1)
    expected = theirs(reference[1], tokens)[:-1]
    assert [entry.token for entry in found] == tokens[1:]
    own = expected[torch.arange(74), torch.tensor(tokens[1:])]
    assert [entry.logprob for entry in found] == pytest.approx(own.tolist(), abs=1e-4)
    assert [[token for token, _ in entry.top] for entry in found] == expected.topk(2).indices.tolist()
    assert [entry.rank for entry in found] == ((expected > own[:, None]).sum(-1) + 1).tolist()


def test_a_seed_gives_the_same_text_in_any_company(runner: TorchRunner) -> None:
    tokens, asked = prompt(4, 10), {"temperature": 0.9, "top_p": 0.95, "seed": 77}
    alone = Driver(runner, list(range(20)))
    first = alone.step((0, 0, 10), admitted=(alone.init(0, tokens, **asked),))[0]
    expected = alone.decode(0, first, 10, 14)
    alone.release(0)

    company = Driver(runner, list(range(99, 0, -1)))
    others = [company.init(row, prompt(row + 5, 10), temperature=1.3, seed=row) for row in (0, 1, 3)]
    admitted = (*others, company.init(2, tokens, **asked))
    last = company.step(*((row, 0, 10) for row in range(4)), admitted=admitted)
    ours = [last[2]]
    for step in range(13):
        last = company.step(*((row, 10 + step, 1) for row in range(4)))
        ours.append(last[2])
    company.release(0, 1, 2, 3)
    assert ours == expected


def test_resumed_after_preemption_it_goes_on_as_if_nothing_had_been(runner: TorchRunner) -> None:
    """The draw depends on seed and position, the penalties on what was generated: both are known again."""
    tokens = prompt(5, 9)
    asked = {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.8, "repetition_penalty": 1.2}
    whole = Driver(runner, list(range(20)))
    first = whole.step((0, 0, 9), admitted=(whole.init(0, tokens, **asked),))[0]
    expected = whole.decode(0, first, 9, 12)
    whole.release(0)

    resumed = Driver(runner, list(range(30, 60)))
    known = tokens + expected[:5]
    again = resumed.init(3, known, **asked)
    again = type(again)(again.row, again.request_id, again.tokens, 9, again.sampling, again.blocks)
    first = resumed.step((3, 0, 14), admitted=(again,))[3]
    ours = resumed.decode(3, first, 14, 7)
    resumed.release(3)
    assert ours == expected[5:]


def test_a_row_used_again_shows_nothing_of_its_past(runner: TorchRunner) -> None:
    """Same row, same blocks, long before and short after; penalties, bias and log-probabilities before, none after."""
    fresh, tokens = Driver(runner, list(range(60, 90))), prompt(6, 7)
    first = fresh.step((1, 0, 7), admitted=(fresh.init(1, tokens),))[1]
    expected = fresh.decode(1, first, 7, 10)
    fresh.release(1)
    for seed in range(3):
        past = Driver(runner, list(range(40)))
        loud = {"temperature": 1.0, "repetition_penalty": 3.0, "logit_bias": ((9, 50.0),), "logprobs": 5}
        first = past.step((0, 0, 60), admitted=(past.init(0, prompt(seed + 10, 60), **loud),))[0]
        past.decode(0, first, 60, 8)
        again = Driver(runner, list(range(40)))
        runner.launch(StepPlan(step=1, slices=(), released=(0,), admitted=(again.init(0, tokens),)))
        runner.collect()
        first = again.step((0, 0, 7))[0]
        assert again.result is not None
        assert again.result.logprobs == ()
        assert again.decode(0, first, 7, 10) == expected
        again.release(0)


def test_a_step_that_ran_out_of_memory_can_be_granted_again(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's diff stays, nothing was sampled: the same grant gives what it would have given."""
    tokens, asked = prompt(7, 9), {"temperature": 0.0, "frequency_penalty": 0.9}
    calm = Driver(runner, list(range(20)))
    first = calm.step((0, 0, 9), admitted=(calm.init(0, tokens, **asked),))[0]
    expected = calm.decode(0, first, 9, 6)
    calm.release(0)

    driver = Driver(runner, list(range(20)))
    with monkeypatch.context() as patch:
        patch.setattr(runner._model, "logits", lambda _: torch.empty(1 << 58))
        with pytest.raises(OutOfMemory) as caught:
            driver.step((0, 0, 9), admitted=(driver.init(0, tokens, **asked),))
    assert caught.value.requested_bytes == 4 << 58
    with pytest.raises(EngineFault):
        runner.collect()  # there is no result of it
    first = driver.step((0, 0, 9))[0]
    assert driver.decode(0, first, 9, 6) == expected
    driver.release(0)


CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 512.00 MiB is "
    "free. Including non-PyTorch memory, this process has 78.60 GiB memory in use."
)


@pytest.mark.parametrize(
    ("error", "requested", "free"),
    [
        (torch.OutOfMemoryError(CUDA), 5 << 29, 512 << 20),
        (
            RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
            4096,
            0,
        ),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), 0, 0),
        (MemoryError(), 0, 0),
    ],
)
def test_failed_allocations_are_out_of_memory(error: Exception, requested: int, free: int) -> None:
    with pytest.raises(OutOfMemory) as caught, translated():
        raise error
    assert (caught.value.requested_bytes, caught.value.free_bytes) == (requested, free)
    assert caught.value.__cause__ is error


def test_other_failures_are_faults_and_ours_pass_through() -> None:
    with pytest.raises(EngineFault, match="shapes cannot be multiplied"), translated():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(KeyError), translated():
        raise KeyError("x")


def test_what_a_step_needed_is_not_what_was_given_back_meanwhile(
    reference: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are discarded at the begin of a step: hundreds of them, when many requests end at once."""
    directory, model = reference
    config = EngineConfig(model_dir=str(directory), max_num_seqs=256, max_model_len=512, block_size=BLOCK)
    started = start(config, prepare_tiny(directory, model), directory, lambda *_: None)
    assert started.pool is not None
    blocks, length = started.resolved.kv_blocks, started.pool[1]
    assert length > 64 << 20
    with torch.inference_mode():
        started.runner._store._pool.fill_(1.0)  # all of it is resident
    driver = Driver(started.runner, [0, 1])
    init = driver.init(0, prompt(1, 5))
    plan = StepPlan(
        step=1, slices=(driver.slice(0, 0, 5),), admitted=(init,), discarded=tuple(range(blocks // 2, blocks))
    )
    monkeypatch.setattr(started.runner._meter, "_peak_not_before_ns", 0)  # this step is one that is measured
    free = heap()  # of what earlier tests left: the bound counts it as used
    started.runner.launch(plan)
    needed = started.runner.collect().memory_peak_bytes
    assert 0 < needed < length / 4 + (free.free_bytes if free else 0)
    started.runner.close()
