"""A tokenizer.json from a GGUF's metadata, with the `tokenizers` library.

Two kinds exist: 'gpt2' (byte-level BPE, whose splitting of text into words is named by tokenizer.ggml.pre) and 'llama'
(SentencePiece BPE with byte fallback, whose merges follow from the scores). Enter at `convert`.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.errors import TokenizerError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
# How text is divided into words: patterns applied one after the other. From llama.cpp's src/llama-vocab.cpp, where they
# are named, and from the tokenizer.json of the models.
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT2 = (_GPT2_WORDS,)
_SMOLLM = (r"\p{N}", _GPT2_WORDS)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")
_LLAMA3 = (_WORDS % r"\p{N}{1,3}",)
_QWEN2 = (_WORDS % r"\p{N}",)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_PRE_TOKENIZERS = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


def convert(metadata: dict[str, Any]) -> Any:
    """A tokenizers.Tokenizer. Raises TokenizerError for a kind or pre-tokenizer that is not known, naming it."""
    kind = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata:
        raise TokenizerError("the GGUF has no tokenizer", "use one made by a current converter")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise TokenizerError(f"tokenizer.ggml.model = {kind!r} is not served", "served are gpt2 and llama")
    _add_special(tokenizer, metadata)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if adds_bos(metadata) and bos is not None:
        name = metadata["tokenizer.ggml.tokens"][bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", pair=f"{name} $A $B", special_tokens=[(name, bos)]
        )
    return tokenizer


def adds_bos(metadata: dict[str, Any]) -> bool:
    """Whether a plain prompt begins with the begin mark: as said, else as the kind's habit is."""
    default = metadata.get("tokenizer.ggml.model") == "llama"
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _byte_level(metadata: dict[str, Any]) -> Any:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise TokenizerError(f"tokenizer.ggml.pre = {name!r} is not served", f"served are {', '.join(_PRE_TOKENIZERS)}")
    patterns = _PRE_TOKENIZERS[name]
    vocabulary = {piece: index for index, piece in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=patterns in (_LLAMA3, _TEKKEN)))
    if patterns is _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict[str, Any]) -> Any:
    pieces: list[str] = metadata["tokenizer.ggml.tokens"]
    scores: list[float] = metadata.get("tokenizer.ggml.scores") or [0.0] * len(pieces)
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, scores, metadata.get("tokenizer.ggml.token_type")),
            unk_token=pieces[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: list[float], types: list[int] | None) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best: so each way to make a piece is a merge, best score first;
    among the ways, the parts that come first in the vocabulary."""
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocabulary.items():
        if types is not None and types[index] != _NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _add_special(tokenizer: Any, metadata: dict[str, Any]) -> None:
    """Control and user-defined tokens are found in text as wholes; control ones give no text."""
    pieces, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type") or []
    for piece, kind in zip(pieces, types, strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False)])
