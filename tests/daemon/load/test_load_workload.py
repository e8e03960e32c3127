"""The requests of a load test are seeded, of the lengths asked for, and do not flatter a prefix cache."""

from collections import Counter

import pytest

from autotune import workload
from autotune.workload import Job
from daemon.load.scenarios import ARRIVALS, SCENARIOS, Lengths, scenario
from daemon.load.workload import Sizer, Workload, calibration, sized


def test_same_seed_same_requests_other_seed_others() -> None:
    one, same, other = (Workload(scenario("mixed"), seed) for seed in (7, 7, 8))
    assert [one.request(i) for i in range(20)] == [same.request(i) for i in range(20)]
    assert all(one.request(i).prompt != other.request(i).prompt for i in range(20))
    assert one.request(13) == [one.request(i) for i in range(20)][13]


def test_lengths_lie_in_their_range_and_reach_its_ends() -> None:
    work = Workload(scenario("short", Lengths(10, 12), Lengths(5, 6)), seed=1)
    requests = [work.request(i) for i in range(200)]
    assert {r.prompt_tokens for r in requests} == {10, 11, 12}
    assert {r.max_tokens for r in requests} == {5, 6}


def test_mixed_holds_both_kinds_in_their_shares() -> None:
    kinds = Counter(Workload(scenario("mixed"), seed=3).request(i).kind for i in range(1000))
    assert 750 < kinds["short"] < 850
    assert kinds["long"] == 1000 - kinds["short"]


def test_prompts_differ_right_after_the_opening() -> None:
    work = Workload(scenario("short"), seed=1)
    opening, _ = calibration()
    starts = {" ".join(work.request(i).prompt.removeprefix(opening).split()[:4]) for i in range(200)}
    assert len(starts) == 200


def test_a_sizer_from_counts_makes_prompts_of_the_length_aimed_at() -> None:
    opening, sample = calibration()

    def count(text: str) -> int:  # a tokenizer with 1.5 tokens a word
        return int(1.5 * len(text.split()))

    sizer = sized(count(opening), count(sample))
    assert sizer.source == "tokenize"
    request = Workload(scenario("long", Lengths(2000, 2000)), 1, sizer).request(0)
    assert abs(count(request.prompt) - 2000) <= 10


def test_without_counts_a_word_is_a_token() -> None:
    assert Sizer().words(100) == 100
    assert Sizer().source == "words"


@pytest.mark.parametrize("text", ["0", "5:4", "x", "-3:4", ""])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Lengths.parse(text)


def test_a_range_is_a_number_or_two() -> None:
    assert Lengths.parse("7") == Lengths(7, 7)
    assert Lengths.parse("7:9") == Lengths(7, 9)


def test_the_names_are_those_of_the_workloads() -> None:
    assert sorted(workload.LENGTHS) == list(SCENARIOS)
    assert sorted(workload.ARRIVALS) == list(ARRIVALS)


def test_prompts_share_just_what_their_streams_share() -> None:
    work = Workload(scenario("shared"), seed=1)

    def words(**fields: int) -> list[str]:
        return work.of(Job(at_s=0.0, output_tokens=1, **fields)).prompt.split()

    opening = len(calibration()[0].split())
    one = words(prompt_tokens=80, stream=1, system=1, system_tokens=50)
    other = words(prompt_tokens=80, stream=2, system=1, system_tokens=50)
    assert one[: opening + 50] == other[: opening + 50]
    assert one[opening + 50 :][:4] != other[opening + 50 :][:4]
    later = words(prompt_tokens=200, stream=1, system=1, system_tokens=50)  # the next turn: what was said, and more
    assert later[: len(one)] == one
    assert words(prompt_tokens=80, stream=1, system=2, system_tokens=50)[opening:][:4] != one[opening:][:4]
