"""Vocabularies as a GGUF's metadata holds them, small enough to be read: byte-level BPE and SentencePiece."""

from typing import Any

from tokenizers import pre_tokenizers

_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6


def byte_level(pre: str = "smollm", merges: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """'<|end|>' 0, '<s>' 1, '<think>' 2 (user-defined), then 256 letters, then what `merges` make."""
    marks = ["<|end|>", "<s>", "<think>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*marks, *letters, *(merge.replace(" ", "") for merge in merges)]
    kinds = [_CONTROL, _CONTROL, _USER] + [_NORMAL] * (len(tokens) - len(marks))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        **more,
    }


def sentencepiece(**more: Any) -> dict[str, Any]:
    """'<|end|>' 0, '<s>' 1, '<unk>' 2, 256 bytes, then pieces, the better scored first, then single letters."""
    pieces = [
        "▁hello",
        "hello",
        "▁wor",
        "ell",
        "▁h",
        "lo",
        "he",
        "or",
        "▁w",
        "el",
        "l",
        "▁",
        "h",
        "e",
        "o",
        "w",
        "r",
        "d",
        "é",
    ]
    tokens = ["<|end|>", "<s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [_CONTROL, _CONTROL, _UNKNOWN] + [_BYTE] * 256 + [_NORMAL] * len(pieces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        **more,
    }
