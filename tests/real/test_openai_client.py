"""The public `openai` client against the real model: what it returns, streams and raises."""

from collections.abc import Iterator

import openai
import pytest

from tests.served import Served

RIVERS = [{"role": "user", "content": "Name three rivers."}]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as value:
        yield value


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["smollm2"]


def test_chat_answers_sensibly(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=40,
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_text_equals_unstreamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=RIVERS, temperature=0, max_tokens=32)
    chunks = list(
        client.chat.completions.create(
            model="smollm2",
            messages=RIVERS,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    usages = [c.usage for c in chunks if c.usage]
    assert len(usages) == 1
    assert usages[0] == whole.usage or usages[0].total_tokens == whole.usage.total_tokens  # type: ignore[union-attr]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_completions_stream(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="smollm2", prompt="The capital of Italy is", temperature=0, max_tokens=12)
    parts = client.completions.create(
        model="smollm2", prompt="The capital of Italy is", temperature=0, max_tokens=12, stream=True
    )
    assert "".join(p.choices[0].text for p in parts if p.choices) == whole.choices[0].text
    assert "Rome" in whole.choices[0].text


def test_two_choices_differ_and_repeat_by_seed(client: openai.OpenAI) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model="smollm2", messages=RIVERS, n=2, seed=7, temperature=1.0, max_tokens=24
        )
        return [c.message.content for c in sorted(answer.choices, key=lambda c: c.index)]

    first = ask()
    assert len(first) == 2
    assert first[0] != first[1]
    assert ask() == first


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=RIVERS, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content
    for item in content:
        assert item.logprob <= 0
        assert len(item.top_logprobs) == 3
        assert item.top_logprobs[0].logprob == pytest.approx(item.logprob, abs=1e-4)


def test_stop_string_is_never_shown(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(model="smollm2", messages=RIVERS, temperature=0, max_tokens=32)
    text = free.choices[0].message.content or ""
    stop = text[10:14]
    answer = client.chat.completions.create(model="smollm2", messages=RIVERS, temperature=0, max_tokens=32, stop=[stop])
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_errors_map_to_the_clients_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=RIVERS)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="smollm2", messages=RIVERS, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert refused.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="smollm2", prompt="word " * 20_000)
    assert too_long.value.code == "context_length_exceeded"
