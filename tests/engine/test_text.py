"""Text: what is streamed is the text, wherever it is cut; stop strings never show, not even in part."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from engine.errors import RequestError, TokenizerError
from engine.load.gguf_tokenizer import convert
from engine.manifest import Manifest
from engine.modelspec import ModelSpec
from engine.text import StopStrings, Text
from tests.fakes.vocabularies import byte_level, sentencepiece

SPEC = ModelSpec(
    family="llama",
    vocab_size=400,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position=64,
    tie_embeddings=True,
)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n  {%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write(directory: Path, tokenizer: Any, template: str | None = TEMPLATE, **facts: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    Manifest(
        spec=SPEC,
        digest="d",
        source="s",
        name="n",
        weights=(),
        weights_dtype="float32",
        weights_bytes=0,
        parameters=0,
        bytes_by_dtype={},
        has_chat_template=template is not None,
        **facts,
    ).save(directory)
    return directory


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Text:
    meta = byte_level() if request.param == "byte-level" else sentencepiece()
    return Text(write(tmp_path_factory.mktemp("text"), convert(meta), bos_token_id=1, eos_token_ids=(0,)))


def streamed(text: Text, tokens: list[int], stop: list[str]) -> list[str]:
    """The pieces that a client gets for `tokens`."""
    detokenizer, stops = text.detokenizer(), text.stops(stop)
    pieces = []
    for token in tokens:
        pieces.append(stops.push(detokenizer.push(token)))
        if stops.hit:
            return pieces
    return [*pieces, stops.push(detokenizer.flush()), stops.flush()]


def cut_at_first_stop(whole: str, stop: list[str]) -> str:
    """The rule, plainly: the stop string that is complete first; of two complete at once the longer."""
    ends = [(whole.find(s) + len(s), -len(s)) for s in stop if s in whole]
    return whole[: min(ends)[0] + min(ends)[1]] if ends else whole


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_streamed_pieces_concatenate_to_the_text(text: Text, data: st.DataObject) -> None:
    """Any tokens, so that UTF-8 is split, invalid and unfinished; stop strings from the text itself. Nothing of a stop
    string shows, and what was held back comes at the end."""
    ids = data.draw(st.lists(st.integers(0, 330), max_size=40))
    special = {0, 1}
    whole = b"".join(text.token_bytes(i) for i in ids if i not in special).decode("utf-8", "replace")
    near = st.builds(lambda a, n: whole[a : a + n], st.integers(0, max(0, len(whole) - 1)), st.integers(1, 6))
    stop = [s for s in data.draw(st.lists(near | st.text("ab\n", min_size=1, max_size=3), max_size=3)) if s]
    assert "".join(streamed(text, ids, stop)) == cut_at_first_stop(whole, stop)


@settings(max_examples=300, deadline=None)
@given(
    whole=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(whole: str, stop: list[str], seed: int) -> None:
    """Two letters only, so that stop strings overlap with themselves and with each other. What was let through is at
    every moment a beginning of the final text."""
    rng, stops, out, at = random.Random(seed), StopStrings(stop), "", 0
    want = cut_at_first_stop(whole, stop)
    while at < len(whole) and not stops.hit:
        step = rng.randint(1, 4)
        out += stops.push(whole[at : at + step])
        at += step
        assert want.startswith(out)
    out += stops.flush()
    assert out == want
    assert stops.hit == any(s in whole for s in stop)


def test_a_held_back_end_is_as_short_as_it_can_be() -> None:
    stops = StopStrings(["User:"])
    assert [stops.push(c) for c in "a Us er"] == ["a", " ", "", "", "Us ", "e", "r"]
    assert stops.push(" Use") == " "
    assert stops.flush() == "Use"


def test_after_a_stop_string_nothing_comes() -> None:
    stops = StopStrings(["END"])
    assert stops.push("one EN") == "one "
    assert stops.push("D two") == ""
    assert (stops.hit, stops.push("three"), stops.flush()) == (True, "", "")


def test_a_character_of_four_bytes_comes_whole(text: Text) -> None:
    ids = text.encode("🙂")
    assert len(ids) >= 4
    detokenizer = text.detokenizer()
    pieces = [detokenizer.push(token) for token in ids]
    assert [p for p in pieces if p.strip()] == ["🙂"] or "".join(pieces).endswith("🙂")
    assert "\ufffd" not in "".join(pieces)
    cut = text.detokenizer()
    assert "".join(cut.push(token) for token in ids[:-1]).strip() == ""
    assert cut.flush() == "\ufffd"


@settings(max_examples=200, deadline=None)
@given(whole=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_encoding_and_decoding_are_the_librarys(text: Text, whole: str) -> None:
    """As transformers' fast tokenizer does it from the same file."""
    reference: Any = text._tokenizer
    ids = text.encode(whole)
    assert ids == reference.encode(whole).ids
    assert text.decode(ids) == reference.decode(ids, skip_special_tokens=False)


def test_it_agrees_with_transformers(tmp_path: Path) -> None:
    directory = write(tmp_path, convert(byte_level()), eos_token_ids=(0,))
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), bos_token="<s>", eos_token="<|end|>"
    )
    text = Text(directory)
    messages = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "hello\n<|end|> wörld"}]
    rendered = fast.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True)
    assert "<s>" + text.render(messages) == rendered  # ours has no bos_token_id here
    assert text.encode_chat(messages) == fast.encode(text.render(messages), add_special_tokens=False)


def test_special_tokens_written_in_a_prompt_are_parsed_as_vllm_does(text: Text) -> None:
    assert 0 in text.encode("a<|end|>b")


def test_text_that_goes_on_keeps_its_space_and_text_that_begins_has_none(tmp_path: Path) -> None:
    text = Text(write(tmp_path, convert(sentencepiece())))
    ids = text.encode("hello")
    assert text.decode(ids) == "hello"
    detokenizer = text.detokenizer()
    assert "".join(detokenizer.push(token) for token in ids) == " hello"


def test_a_lone_surrogate_is_the_requests_fault(text: Text) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        text.encode("a\ud800")


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = convert(byte_level())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert len(Text(write(tmp_path, tokenizer)).encode("a long prompt, longer than four")) == len(
        "a long prompt, longer than four"
    )


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 330), max_size=20))
def test_offsets_are_places_in_the_text(text: Text, ids: list[int]) -> None:
    """A token that begins a character begins where the text of those before it ends."""
    whole, offsets = text.decode(ids), text.offsets(ids)
    assert offsets == sorted(offsets)
    for number, offset in enumerate(offsets):
        before, rest = text.decode(ids[:number]), b"".join(text.token_bytes(i) for i in ids[number:])
        if not before.endswith("\ufffd") and rest.isascii():
            assert whole[:offset] == before


def test_ids_beyond_the_vocabulary_give_nothing(text: Text) -> None:
    assert (text.token_bytes(399), text.decode([399, -1]), text.detokenizer().push(10_000)) == (b"", "", "")


# chat templates


def test_a_model_without_a_template_serves_completions_and_refuses_chat(tmp_path: Path) -> None:
    text = Text(write(tmp_path, convert(byte_level()), template=None))
    assert text.encode("hi")
    with pytest.raises(RequestError, match=r"no chat template.*/v1/completions"):
        text.encode_chat([{"role": "user", "content": "hi"}])


def test_a_template_that_does_not_compile_refuses_chat_only(tmp_path: Path) -> None:
    text = Text(write(tmp_path, convert(byte_level()), template="{% if %}"))
    assert text.encode("hi")
    with pytest.raises(RequestError, match="does not compile"):
        text.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[9].content }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].content + 1 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ range(10000000) | list }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_whatever_a_template_does_is_a_refused_request(tmp_path: Path, template: str) -> None:
    """Its own refusal, its author's mistakes, and what the sandbox keeps from it."""
    text = Text(write(tmp_path, convert(byte_level()), template=template))
    with pytest.raises(RequestError, match="chat template refused"):
        text.encode_chat([{"role": "user", "content": "hi"}])


def test_templates_get_what_transformers_gives_them(tmp_path: Path) -> None:
    template = (
        "{% if tools is not none %}T{% endif %}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    text = Text(write(tmp_path, convert(byte_level()), template=template))
    assert text.render([{"role": "user", "content": "<é>"}] * 2) == '{"role": "user", "content": "<é>"}4'


def test_an_unusable_tokenizer_file_is_a_tokenizer_error(tmp_path: Path) -> None:
    write(tmp_path, convert(byte_level()))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="not usable"):
        Text(tmp_path)


def test_a_decoder_that_is_not_known_is_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(convert(byte_level()).to_str())
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        Text(write(tmp_path, tokenizer))
