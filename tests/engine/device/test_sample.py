"""The sampler against naive implementations of what each parameter promises."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.device.sample import Draw, Sampler, drawn, logprob_of, uniform
from engine.plan import RowInit
from engine.request import SamplingParams

VOCAB = 1500  # more than the candidates that are looked at first


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, **given})


def logits(seed: int = 0, scale: float = 2.0, size: int = VOCAB) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def naive(logits: Tensor, given: SamplingParams) -> Tensor:
    """The filtered distribution, the plain way: sort everything."""
    probabilities = torch.softmax(logits.double() / given.temperature, -1)
    values, order = probabilities.sort(descending=True)
    if given.top_k:
        values[given.top_k :] = 0
        values /= values.sum()
    before = values.cumsum(-1) - values
    values[before >= given.top_p] = 0
    values[values < given.min_p * values[0]] = 0
    return torch.zeros_like(values).scatter_(0, order, values / values.sum())


@pytest.mark.parametrize("given", [{}, {"top_k": 40}, {"top_p": 0.5}, {"min_p": 1e-320, "temperature": 1e-300}])
@pytest.mark.parametrize("penalty", [1e-320, 1e-40, 1e-38, 10.0])
def test_no_legal_parameter_and_no_broken_logits_draw_what_is_no_token(given: dict[str, Any], penalty: float) -> None:
    """One request's token out of the vocabulary would end the engine, and with it everybody's."""
    sampler = Sampler(VOCAB, torch.device("cpu"))
    one = params(repetition_penalty=penalty, min_tokens=5, stop_token_ids=tuple(range(VOCAB)), **given)
    sampler.begin(RowInit(0, "r", tuple(range(VOCAB - 1)), VOCAB - 1, one))
    broken = [torch.full((VOCAB,), value) for value in (float("nan"), float("inf"), float("-inf"), 3e38, 0.0)]
    broken[0][3:] = 1.0
    for row in (logits(), *broken):
        for position in (VOCAB, VOCAB + 6):  # every token forbidden, and none
            tokens, _ = sampler.sample(row[None], [Draw(0, position, VOCAB - 1, one)])
            assert 0 <= tokens[0] < VOCAB


FILTERS = [
    {},
    {"temperature": 0.3},
    {"top_k": 5},
    {"top_k": 900, "top_p": 0.97},
    {"top_p": 0.6},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
    {"top_p": 1e-9},
]


@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(given: dict[str, Any]) -> None:
    """Every quantile falls on a token that may come; and each token comes as often as it should."""
    one, count = params(**given), 1500
    expected = naive(logits(), one)
    drawn_tokens = Counter(drawn(logits(), one, (i + 0.5) / count) for i in range(count))
    assert all(expected[token] > 0 for token in drawn_tokens)
    for token in expected.topk(3).indices.tolist():
        assert drawn_tokens[token] / count == pytest.approx(float(expected[token]), abs=1.5 / count)


@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_the_ends_of_the_unit_interval_are_legal(given: dict[str, Any]) -> None:
    expected = naive(logits(), params(**given))
    for u in (0.0, 1.0 - 2**-53):
        assert expected[drawn(logits(), params(**given), u)] > 0


def test_forbidden_tokens_never_come() -> None:
    row = logits(size=40)
    row[:39] = float("-inf")
    assert {drawn(row, params(), i / 50) for i in range(50)} == {39}


def test_uniform_numbers_are_even_and_differ_by_seed_and_position() -> None:
    numbers = [uniform(seed, position) for seed in range(60) for position in range(60)]
    assert len(set(numbers)) == len(numbers)
    assert all(0.0 <= number < 1.0 for number in numbers)
    tenths = Counter(int(number * 10) for number in numbers)
    assert all(abs(tenths[i] - 360) < 80 for i in range(10))
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)  # a negative seed is a seed


def sampler(*inits: RowInit) -> Sampler:
    made = Sampler(VOCAB, torch.device("cpu"))
    for init in inits:
        made.begin(init)
    return made


def init(row: int, tokens: list[int], prompt_len: int, given: SamplingParams) -> RowInit:
    return RowInit(row, f"r{row}", tuple(tokens), prompt_len, given)


def test_alone_or_in_company_the_same_token() -> None:
    kinds = [params(seed=i, **given) for i, given in enumerate(FILTERS)] + [params(temperature=0.0, logprobs=2)]
    rows = torch.stack([logits(i) for i in range(len(kinds))])
    draws = [Draw(i, 9, 4, given) for i, given in enumerate(kinds)]
    together, details = sampler().sample(rows, draws)
    for i, draw in enumerate(draws):
        alone, detail = sampler().sample(rows[i : i + 1], [draw])
        assert (alone[0], detail[0]) == (together[i], details[i])


def test_greedy_takes_the_best_on_the_fast_way_and_the_slow_one() -> None:
    rows, greedy = torch.stack([logits(1), logits(2)]), params(temperature=0.0)
    fast, none = sampler().sample(rows, [Draw(0, 5, 5, greedy), Draw(1, 5, 5, greedy)])
    slow, _ = sampler().sample(rows, [Draw(0, 5, 5, greedy), Draw(1, 5, 5, params(temperature=0.0, logprobs=0))])
    assert fast == slow == rows.argmax(-1).tolist()
    assert none == [None, None]


def penalised(row: Tensor, tokens: list[int], prompt_len: int, given: SamplingParams) -> Tensor:
    """Repetition over everything (CTRL), presence and frequency over the output (OpenAI): token by token."""
    out = row.tolist()
    for token in set(tokens):
        value = out[token]
        out[token] = value / given.repetition_penalty if value > 0 else value * given.repetition_penalty
    for token, times in Counter(tokens[prompt_len:]).items():
        out[token] -= given.presence_penalty + times * given.frequency_penalty
    return torch.tensor(out)


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 1.8},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.4, "presence_penalty": -1.0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.9},
    ],
    ids=str,
)
def test_penalties_follow_the_definition_token_by_token(given: dict[str, Any]) -> None:
    """With output known at admission (after a preemption), and output that the sampler draws itself."""
    one = params(temperature=0.0, **given)
    tokens, prompt_len = [3, 3, 7, 11, 7], 3
    made = sampler(init(0, tokens, prompt_len, one))
    for step in range(30):
        row = logits(step % 3, scale=1.0)
        got, _ = made.sample(row[None], [Draw(0, len(tokens), prompt_len, one)])
        assert got[0] == int(penalised(row, tokens, prompt_len, one).argmax())
        tokens.append(got[0])


def test_a_row_that_begins_again_remembers_nothing() -> None:
    heavy = params(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    row = logits(scale=0.1)[None]
    fresh = sampler(init(0, [1], 1, heavy)).sample(row, [Draw(0, 1, 1, heavy)])
    used = sampler(init(0, [1, *range(500)], 1, heavy))
    used.sample(row, [Draw(0, 501, 1, heavy)])
    used.end(0)
    used.begin(init(0, [1], 1, heavy))
    assert used.sample(row, [Draw(0, 1, 1, heavy)]) == fresh
    used.begin(init(0, [1], 1, params(temperature=0.0)))  # and a plain one has no counts at all
    assert used.sample(row, [Draw(0, 1, 1, params(temperature=0.0))])[0] == [int(row.argmax())]


def test_bias_adds_and_leaves_the_models_logits_alone() -> None:
    row = logits()[None]
    before = row.clone()
    one = params(temperature=0.0, logit_bias=((17, 100.0), (18, -100.0)), logprobs=1)
    (token,), (detail,) = sampler().sample(row, [Draw(0, 4, 4, one)])
    assert token == 17
    assert torch.equal(row, before)
    assert detail is not None
    assert detail.logprob == pytest.approx(float(torch.log_softmax(before[0], -1)[17]), abs=1e-5)


def test_no_end_before_the_minimum_length() -> None:
    row = logits()[None]
    best, second = row[0].topk(2).indices.tolist()
    one = params(temperature=0.0, min_tokens=2, stop_token_ids=(best,))
    got = [sampler().sample(row, [Draw(0, 10 + n, 10, one)])[0][0] for n in range(4)]
    assert got == [second, second, best, best]


def test_logprobs_ranks_and_alternatives() -> None:
    row = logits()
    expected, order = torch.log_softmax(row, -1), row.argsort(descending=True).tolist()
    for rank in (1, 2, 700):
        found = logprob_of(row, order[rank - 1], 4)
        assert found.rank == rank
        assert found.logprob == pytest.approx(float(expected[order[rank - 1]]), abs=1e-5)
        assert [token for token, _ in found.top] == order[:4]
        assert [value for _, value in found.top] == pytest.approx(expected[order[:4]].tolist(), abs=1e-5)
    assert logprob_of(row, 0, 0).top == ()


def test_a_step_that_fails_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is granted again: the tokens of rows before the failing one must not count twice."""
    one = params(temperature=0.0, frequency_penalty=1.0)
    made = sampler(init(0, [1], 1, one), init(1, [1], 1, one))
    rows, draws = torch.stack([logits(0), logits(1)]), [Draw(0, 1, 1, one), Draw(1, 1, 1, one)]
    choose, calls = made._choose, []

    def failing(row: Tensor, draw: Draw) -> int:
        calls.append(draw.row)
        if draw.row == 1:
            raise torch.OutOfMemoryError("no")
        return choose(row, draw)

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(made, "_choose", failing)
        made.sample(rows, draws)
    assert calls == [0, 1]
    assert all(not counts.output.any() for counts in made._counts.values())
