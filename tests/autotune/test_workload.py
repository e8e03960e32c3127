"""Traffic is seeded, has the shape that its name says, and shares what it says it shares."""

import itertools
import random
from collections import Counter

import pytest

from autotune.simulate import tokens_of
from autotune.workload import ARRIVALS, LENGTHS, MIXES, Job, Replay, shapes, synthetic, trace


def first(lengths: str, count: int, **fields: object) -> list[Job]:
    traffic = synthetic(lengths, seed=7, rate=2.0, **fields)  # type: ignore[arg-type]
    return list(itertools.islice(traffic.arrivals(), count))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_same_seed_gives_the_same_jobs_and_another_gives_others(lengths: str) -> None:
    assert first(lengths, 50) == first(lengths, 50)
    other = list(itertools.islice(synthetic(lengths, seed=8, rate=2.0).arrivals(), 50))
    assert [job.at_s for job in other] != [job.at_s for job in first(lengths, 50)]
    assert all(job.prompt_tokens >= 1 and job.output_tokens >= 1 for job in first(lengths, 500))


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_every_kind_of_arrival_has_the_rate_that_was_asked_for(arrival: str) -> None:
    jobs = list(synthetic("short", seed=3, arrival=arrival, rate=2.0, until_s=7200).arrivals())
    assert 0.85 * 14400 < len(jobs) < 1.15 * 14400
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(jobs))


def test_bursts_are_burstier_than_a_poisson_process() -> None:
    """The variance of counts per 10 s over their mean: 1 for Poisson."""

    def dispersion(arrival: str) -> float:
        jobs = synthetic("short", seed=3, arrival=arrival, rate=2.0, until_s=7200).arrivals()
        counts = Counter(int(job.at_s // 10) for job in jobs)
        values = [counts[n] for n in range(720)]
        mean = sum(values) / len(values)
        return sum((v - mean) ** 2 for v in values) / len(values) / mean

    assert dispersion("poisson") < 1.5
    assert dispersion("bursty") > 3


def test_a_switching_load_changes_every_minute() -> None:
    counts = Counter(
        int(j.at_s // 60) % 2
        for j in synthetic("short", seed=1, arrival="switching", rate=2.0, until_s=3600).arrivals()
    )
    assert counts[1] > 5 * counts[0]


def test_a_closed_loop_has_one_job_for_each_user_and_goes_on_at_their_ends() -> None:
    traffic = synthetic("fixed", seed=1, users=3, until_s=100)
    jobs = list(traffic.arrivals())
    assert len(jobs) == 3
    after = traffic.after(jobs[0], 10.0)
    assert after is not None and after.at_s == 10.0 and after.serial == 4
    assert traffic.after(jobs[1], 100.0) is None


def test_a_heavy_tail_is_heavy() -> None:
    prompts = sorted(job.prompt_tokens for job in first("heavy", 4000))
    assert prompts[2000] < 150
    assert sum(prompts[-400:]) > 0.4 * sum(prompts)


def test_shared_system_prompts_are_shared_and_nothing_else_is() -> None:
    jobs = first("shared", 40)
    one, same = next((a, b) for a, b in itertools.combinations(jobs, 2) if a.system == b.system)
    other = next(job for job in jobs if job.system != one.system)
    a, b, c = tokens_of(one), tokens_of(same), tokens_of(other)
    assert a[:512] == b[:512]
    assert not set(a[512:]) & set(b[512:])
    assert not set(a) & set(c)


def test_a_turn_begins_with_the_whole_turn_before_it() -> None:
    traffic = synthetic("turns", seed=2, users=20)
    for job in traffic.arrivals():
        after = traffic.after(job, 50.0)
        if after is not None and after.turn == 2:
            assert after.stream == job.stream
            assert tokens_of(after)[: job.prompt_tokens] == tokens_of(job)
            assert after.prompt_tokens > job.prompt_tokens + job.output_tokens
            assert after.at_s > 50.0
            return
    raise AssertionError("nobody had a second turn")


def test_no_job_is_longer_than_the_server_takes() -> None:
    for lengths in MIXES:
        jobs = first(lengths, 300, longest=700)
        assert all(job.prompt_tokens + job.output_tokens <= 700 for job in jobs), lengths


def test_a_replay_keeps_the_shapes_and_can_be_faster_or_shared() -> None:
    jobs = first("lognormal", 9)
    faster = list(Replay(jobs, times=2.0).arrivals())
    assert [j.at_s * 2 for j in faster] == pytest.approx([j.at_s for j in jobs])
    assert [j.prompt_tokens for j in faster] == [j.prompt_tokens for j in jobs]
    assert len(list(Replay(jobs).share(3).arrivals())) == 3


def test_a_trace_says_which_line_is_wrong() -> None:
    good = '{"at_s": 1, "prompt_tokens": 5, "output_tokens": 2}'
    late = '{"at_s": 0.5, "prompt_tokens": 7, "output_tokens": 2, "stream": 3}'
    assert [job.prompt_tokens for job in trace([good, "", late])] == [7, 5]
    for bad in ("{", '{"at_s": 1}', '{"at_s": -1, "prompt_tokens": 5, "output_tokens": 2}', '{"x": 1}', "[]"):
        with pytest.raises(ValueError, match="line 2"):
            trace([good, bad])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(KeyError):
        synthetic("nothing", seed=1, rate=1.0)
    with pytest.raises(ValueError, match="no such arrivals"):
        synthetic("short", seed=1, arrival="never", rate=1.0)
    with pytest.raises(ValueError, match="rate or a number of users"):
        synthetic("short", seed=1)


def test_shapes_of_a_journal_are_relative_to_its_first_request() -> None:
    from tests.autotune.records import record

    rng = random.Random(1)
    records = [
        record(n, arrival_s=100 + n, prompt=rng.randint(1, 50), output=n, cached=16 * (n == 3)) for n in range(5)
    ]
    jobs = shapes(records)
    assert [job.at_s for job in jobs] == [0.0, 1.0, 2.0, 3.0]  # the first has no output: it was not served
    assert [job.output_tokens for job in jobs] == [1, 2, 3, 4]
    assert [job.system_tokens for job in jobs] == [0, 0, 16, 0]
