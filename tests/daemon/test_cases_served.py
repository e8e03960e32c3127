"""Cases that only a whole daemon can show: a tiny model behind `inferd serve`, asked over HTTP. The numbers are those
of the catalogue of cases (tests/architecture/test_cases.py says which test shows which)."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.tiny import prepare_tiny, write_tiny
from tests.served import Served, wait_for
from tests.soaking import anonymous_bytes

pytestmark = pytest.mark.timeout(180)
COMPLETIONS = "/v1/completions"
HITS = "inferd_prefix_cache_tokens_total"
PREEMPTIONS = "inferd_preemptions_total"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    prepare_tiny(directory, write_tiny("llama", directory))
    return directory


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Served]:
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--max-num-seqs", "8")
    with Served(tmp_path_factory.mktemp("served"), str(model), *flags) as daemon:
        yield daemon


def sampled(seed: int, tokens: int = 24) -> dict[str, Any]:
    prompt = [1 + (seed * 31 + i * 7) % 256 for i in range(5 + seed % 40)]
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "seed": seed,
        "temperature": 1.0,
        "logprobs": 2,
        "ignore_eos": True,
    }


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    """The first choice of an answer."""
    async with session.post(url + COMPLETIONS, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer["choices"][0]


def limit(served: Served, **changes: int) -> None:
    status, answer = served.control("/inferd/v1/tuner", "POST", {"set": changes, "why": "a test"})
    assert status == 200, answer


def metric(served: Served, name: str, **labels: str) -> float:
    """The sum of the samples of one counter or gauge that have these labels."""
    families = text_string_to_metric_families(served.get("/metrics")[1].decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    values = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
    assert values, f"no sample of {name}"
    return sum(values)


def test_case_41_and_42_a_seed_gives_the_same_answer_alone_in_company_and_after_aborts(served: Served) -> None:
    """Sixteen seeds one after the other, then at once among thirty others of which each leaves when it likes: rows are
    reused, blocks are shared, chunks are cut elsewhere, and every answer is the same to the last log-probability."""
    rng = random.Random(42)
    seeds = range(16)

    async def leaver(session: aiohttp.ClientSession, seed: int) -> None:
        await asyncio.sleep(rng.random() * 0.3)
        try:
            async with asyncio.timeout(rng.random() * 0.3):
                await ask(session, served.url, sampled(seed, 400))
        except TimeoutError:
            pass  # it left: what this test is about

    async def both() -> tuple[list[Any], list[Any]]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            alone = [await ask(session, served.url, sampled(seed)) for seed in seeds]
            served.control("/inferd/v1/cache/reset", "POST", {})
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(session, served.url, sampled(seed))) for seed in seeds]
                for other in range(30):
                    group.create_task(leaver(session, 100 + other))
            return alone, [task.result() for task in tasks]

    alone, together = asyncio.run(both())
    for one, other in zip(alone, together, strict=True):
        assert other["text"] == one["text"]
        assert other["logprobs"]["tokens"] == one["logprobs"]["tokens"]
        assert other["logprobs"]["token_logprobs"] == pytest.approx(one["logprobs"]["token_logprobs"], abs=1e-3)
    assert len({one["text"] for one in alone}) == len(alone)


def test_case_36_random_prompts_have_no_hits_even_when_they_are_preempted(served: Served) -> None:
    """Eight prompts that share nothing, in a pool that holds three of them: what is computed again is no hit."""
    rng = random.Random(36)
    bodies = [
        {"model": "tiny", "prompt": rng.choices(range(1, 257), k=120), "max_tokens": 100, "ignore_eos": True}
        for _ in range(8)
    ]

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(ask(session, served.url, body) for body in bodies))

    before = served.snapshot("limits")["limits"]["kv_blocks"]
    hits, preemptions = metric(served, HITS, outcome="hit"), metric(served, PREEMPTIONS)
    limit(served, kv_blocks=40)
    try:
        asyncio.run(run())
    finally:
        limit(served, kv_blocks=before)
    wait_for(lambda: metric(served, PREEMPTIONS) > preemptions, 60, "a preemption: without one the test shows nothing")
    assert metric(served, HITS, outcome="hit") == hits


def test_case_31_two_thousand_requests_at_one_slot_are_shed_and_both_processes_stay_small(
    tmp_path: Path, model: Path
) -> None:
    flags = ("--served-model-name", "tiny", "--max-num-seqs", "1")
    env = {"INFERD_MAX_QUEUED_REQUESTS": "16"}
    with Served(tmp_path, str(model), *flags, env=env) as served:
        pids = [served.pid, served.engine_pid()]

        async def flood() -> dict[int, int]:
            statuses: dict[int, int] = {}
            body = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 300, "ignore_eos": True}

            async def one(session: aiohttp.ClientSession) -> None:
                async with session.post(served.url + COMPLETIONS, json=body) as response:
                    await response.read()
                    statuses[response.status] = statuses.get(response.status, 0) + 1
                    assert response.status == 200 or int(response.headers["Retry-After"]) >= 1

            connector = aiohttp.TCPConnector(limit=100)
            async with aiohttp.ClientSession(connector=connector) as session:
                await asyncio.gather(*(one(session) for _ in range(200)))
                small = [anonymous_bytes(pid) for pid in pids]
                await asyncio.gather(*(one(session) for _ in range(1800)))
            for pid, before in zip(pids, small, strict=True):
                assert anonymous_bytes(pid) < before + (24 << 20), "memory grows with what is refused"
            return statuses

        statuses = asyncio.run(flood())
        assert set(statuses) == {200, 429}
        assert statuses[429] > 1000
        assert sum(statuses.values()) == 2000
        assert served.post(COMPLETIONS, {"model": "tiny", "prompt": "x", "max_tokens": 1})[0] == 200


def test_case_10_a_start_that_cannot_fit_says_why_in_one_line_and_nothing_to_try(tmp_path: Path, model: Path) -> None:
    served = Served(tmp_path, str(model), "--memory-limit", "64MiB").start(wait=False)
    assert served.process is not None
    assert served.process.wait(120) == 4
    last = served.log.splitlines()[-1]
    assert "does not fit" in last
    assert "--memory-limit" in last
    assert "Traceback" not in served.log
    assert "curl" not in served.log
