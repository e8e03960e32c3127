"""What is kept of a sampled request has its structure and parameters, and nothing that its client wrote."""

import string
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from daemon.api.schema import ChatBody, CompletionBody
from telemetry.events import RequestSample
from telemetry.redact import NUMBERS, OPAQUE, TEXTS, Redactor, RequestSampler

SECRET = "kumquat-7391"


def redacted(value: Any) -> tuple[dict[str, Any], str]:
    found = Redactor(b"salt").body(msgspec.json.encode(value))
    return found, msgspec.json.encode(found).decode()


def test_structure_parameters_and_lengths_stay_and_texts_go() -> None:
    found, text = redacted(
        {
            "model": SECRET,
            "messages": [
                {"role": "system", "content": SECRET},
                {"role": SECRET, "content": [{"type": "text", "text": SECRET}, {"type": "image", SECRET: SECRET}]},
            ],
            "stop": [SECRET, "b"],
            "temperature": 0.5,
            "stream_options": {"include_usage": True},
            "user": SECRET,
            "metadata": {SECRET: SECRET},
            "logit_bias": {"50256": -100},
            SECRET: 4111111111111111,
        }
    )
    assert "kumquat" not in text
    assert "4111" not in text
    assert "50256" not in text
    assert found["temperature"] == 0.5
    assert found["stream_options"] == {"include_usage": True}
    system, other = found["messages"]
    assert (system["role"], system["content"]["chars"]) == ("system", len(SECRET))
    assert other["role"]["chars"] == len(SECRET)
    assert other["content"][0]["type"] == "text"
    assert other["content"][1]["unknown_fields"] == 1
    assert (found["metadata"], found["logit_bias"], found["unknown_fields"]) == ({"entries": 1}, {"entries": 1}, 1)
    assert system["content"]["digest"] == found["stop"][0]["digest"], "the same text"
    assert system["content"]["digest"] != found["stop"][1]["digest"]


def test_token_ids_are_text_and_digests_need_the_salt() -> None:
    found, text = redacted({"prompt": [[1001, 1002, 1003], [7]], "content": 1001, "n": 2})
    assert "100" not in text.replace(found["prompt"][0]["digest"], "").replace(found["prompt"][1]["digest"], "")
    assert [each["tokens"] for each in found["prompt"]] == [3, 1]
    other = Redactor(b"another").body(b'{"prompt": [[1001, 1002, 1003], [7]]}')
    assert other["prompt"][0]["digest"] != found["prompt"][0]["digest"]


def test_what_is_no_object_has_a_length() -> None:
    for data in (b"", b"kumquat", b'["kumquat"]', b"\xff{"):
        assert Redactor().body(data) == {"bytes": len(data)}
    many, _ = redacted({"prompt": ["x"] * 1000})
    assert len(many["prompt"]) == 33
    assert many["prompt"][-1] == {"more": 968}


words = st.text(string.ascii_letters, min_size=8, max_size=12).map(lambda word: f"Zq{word}")
bodies = st.recursive(
    words, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.sampled_from(sorted(TEXTS)), inner)
)


@given(st.dictionaries(words | st.sampled_from(sorted(NUMBERS | TEXTS | OPAQUE)), bodies, max_size=6))
def test_no_word_of_any_body_gets_through(body: dict[str, Any]) -> None:
    _, text = redacted(body)
    assert "Zq" not in text


def test_every_parameter_of_the_api_is_known() -> None:
    assert set(ChatBody.__struct_fields__) | set(CompletionBody.__struct_fields__) <= NUMBERS | TEXTS | OPAQUE


def test_a_share_of_the_requests_is_published() -> None:
    published: list[Any] = []
    chances = iter((0.0, 0.3, 0.24, 0.9))
    sampler = RequestSampler(published.append, 0.25, lambda: next(chances))
    for number in range(4):
        sampler.take(f"r{number}", "chat", b'{"n": 2}')
    assert [(each.group_id, each.body) for each in published] == [(name, {"bytes": 8, "n": 2}) for name in ("r0", "r2")]
    assert all(isinstance(each, RequestSample) for each in published)
