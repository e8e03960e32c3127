"""A tokenizer.json from a GGUF's metadata splits text as the models' own tokenizers do."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import TokenizerError
from engine.load.gguf_tokenizer import adds_bos, convert
from tests.fakes.vocabularies import byte_level, sentencepiece


def words(pre: str, text: str) -> list[str]:
    """How a pre-tokenizer divides `text`, before any merge."""
    tokenizer: Any = convert(byte_level(pre))
    return [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "want"),
    [
        ("smollm", "in 1234's  x", ["in", " ", "1", "2", "3", "4", "'s", " ", " x"]),
        ("gpt-2", "in 1234's  x", ["in", " 1234", "'s", " ", " x"]),
        ("llama-bpe", "in 1234'S\n\nx", ["in", " ", "123", "4", "'S", "\n\n", "x"]),
        ("qwen2", "in 1234'S\n\nx", ["in", " ", "1", "2", "3", "4", "'S", "\n\n", "x"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("default", "a,b 1234 c", ["a", ",", "b", " ", "123", "4", " c"]),
    ],
)
def test_words_are_divided_as_the_name_says(pre: str, text: str, want: list[str]) -> None:
    assert words(pre, text) == want


def test_a_pre_tokenizer_that_is_not_known_is_named() -> None:
    with pytest.raises(TokenizerError, match="'klingon' is not served"):
        convert(byte_level("klingon"))


@pytest.mark.parametrize("kind", ["bert", "t5", None])
def test_a_kind_of_tokenizer_that_is_not_known_is_named(kind: str | None) -> None:
    with pytest.raises(TokenizerError, match=rf"tokenizer.ggml.model = {kind!r}"):
        convert(byte_level() | {"tokenizer.ggml.model": kind})


def test_a_gguf_without_a_tokenizer() -> None:
    with pytest.raises(TokenizerError, match="no tokenizer"):
        convert({"tokenizer.ggml.model": "gpt2"})


def test_merges_are_applied_in_their_order() -> None:
    tokenizer = convert(byte_level(merges=("h e", "l l", "he ll", "Ġ w")))
    assert tokenizer.encode("hello world").tokens == ["hell", "o", "Ġw", "o", "r", "l", "d"]


def test_whole_words_of_a_llama3_vocabulary_need_no_merges() -> None:
    """Its tokenizer ignores merges for a word that is a token (ignore_merges)."""
    meta = byte_level("llama-bpe", merges=("h e",))
    meta["tokenizer.ggml.tokens"].append("hello")
    meta["tokenizer.ggml.token_type"].append(1)
    assert convert(meta).encode("hello").tokens == ["hello"]
    assert convert(meta | {"tokenizer.ggml.pre": "qwen2"}).encode("hello").tokens == ["he", "l", "l", "o"]


def test_special_tokens_are_found_whole_and_give_no_text_user_defined_ones_do() -> None:
    tokenizer = convert(byte_level())
    ids = tokenizer.encode("a<|end|><think>b").ids
    assert ids[1:3] == [0, 2]
    assert tokenizer.decode(ids) == "a<think>b"


def test_a_begin_mark_is_added_if_the_header_says_so() -> None:
    assert convert(byte_level() | {"tokenizer.ggml.add_bos_token": True}).encode("a").ids[0] == 1
    assert convert(byte_level()).encode("a").ids[0] != 1


@pytest.mark.parametrize(("kind", "want"), [("llama", True), ("gpt2", False)])
def test_where_the_header_does_not_say_the_kind_decides(kind: str, want: bool) -> None:
    assert adds_bos({"tokenizer.ggml.model": kind}) is want


def joined(letters: list[str], scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule, plainly: again and again the neighbours whose union scores best, the leftmost of equals."""
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(letters)) if a + b in scores]
        if not pairs:
            return letters
        at = -max(pairs)[1]
        letters = [*letters[:at], letters[at] + letters[at + 1], *letters[at + 2 :]]


@settings(max_examples=200, deadline=None)
@given(text=st.text("helowrd ", min_size=1, max_size=20))
def test_sentencepiece_joins_the_best_scored_pair_first(text: str) -> None:
    meta = sentencepiece()
    scores = dict(zip(meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.scores"], strict=True))
    spaced = "▁" + text.replace(" ", "▁")
    assert convert(meta).encode(text).tokens == joined(list(spaced), scores)


def test_sentencepiece_falls_back_to_bytes() -> None:
    tokenizer = convert(sentencepiece())
    assert tokenizer.encode("é日").tokens == ["▁", "é", "<0xE6>", "<0x97>", "<0xA5>"]
    assert tokenizer.decode(tokenizer.encode("hello 日é").ids) == "hello 日é"


def test_the_space_before_a_text_can_be_turned_off() -> None:
    tokenizer = convert(sentencepiece(**{"tokenizer.ggml.add_space_prefix": False}))
    assert tokenizer.encode("he").tokens == ["he"]
    assert tokenizer.decode(tokenizer.encode(" hello").ids) == " hello"
