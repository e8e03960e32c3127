"""Text: between characters and tokens, for the daemon: tokenizer, chat template, detokenizer, stop strings.

Reads a prepared directory (tokenizer.json, chat_template.jinja) with `tokenizers` alone: no transformers, no torch.
Chat templates come from strangers, so they run in jinja2's immutable sandbox. It must not know HTTP or requests' lives.
Enter at `Text`.

Special tokens written out in a prompt are parsed as such, as vLLM and transformers do it; a chat template relies on it.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from engine.errors import RequestError, TokenizerError
from engine.manifest import Manifest

_SPACE = "▁"  # how SentencePiece writes a space
# What a stranger's program may raise: its own refusals, and every mistake of its author.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Text:
    """The text side of one prepared model. Thread-safe after construction. Raises TokenizerError."""

    def __init__(self, directory: Path | str) -> None:
        directory = Path(directory)
        manifest = Manifest.load(directory)
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception for all it cannot read
            raise TokenizerError(f"{directory / 'tokenizer.json'} is not usable: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = manifest.spec.vocab_size
        self._pieces, self._special, self._strip = _pieces(self._tokenizer)
        self._special_tokens = {
            "bos_token": self._name(manifest.bos_token_id),
            "eos_token": self._name(manifest.eos_token_ids[0] if manifest.eos_token_ids else None),
        }
        self._template: jinja2.Template | None = None
        self._no_template = "this model has no chat template"
        if manifest.has_chat_template:
            try:
                self._template = _template(directory)
            except TokenizerError as error:  # plain completions are served all the same
                self._no_template = error.message

    def encode(self, text: str) -> list[int]:
        """Token ids, with the model's begin mark if it wants one. Raises RequestError for what is no Unicode."""
        return self._ids(text, special=True)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation that asks for the assistant's turn. Raises RequestError if the model has no chat
        template, or its template refuses these messages."""
        return self._ids(self.render(messages), special=False)

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt text of a conversation."""
        if self._template is None:
            raise RequestError(self._no_template, "use /v1/completions with a prompt")
        try:
            return self._template.render(
                messages=list(messages), tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except _TEMPLATE_ERRORS as error:
            raise RequestError(f"the model's chat template refused these messages: {error}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """The text that begins with `tokens`, special ones written out. Ids beyond the vocabulary give nothing."""
        data = b"".join(self.token_bytes(token) for token in tokens)
        return (data.removeprefix(b" ") if self._strip else data).decode("utf-8", "replace")

    def offsets(self, tokens: Sequence[int]) -> list[int]:
        """Where each token begins in `decode(tokens)`, in characters; one inside a character begins where that ends."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        found, at = [], 0
        for number, token in enumerate(tokens):
            found.append(at)
            data = self.token_bytes(token)
            at += len(decode(data.removeprefix(b" ") if self._strip and not number else data))
        return found

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; b"" for an id without a piece."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    def detokenizer(self) -> "Detokenizer":
        return Detokenizer(self._pieces, self._special)

    def stops(self, strings: Sequence[str]) -> "StopStrings":
        return StopStrings(strings)

    def _ids(self, text: str, special: bool) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the text is not valid Unicode: {error}") from error
        return ids

    def _name(self, token: int | None) -> str:
        return "" if token is None else self._tokenizer.id_to_token(token) or ""


class Detokenizer:
    """One choice's tokens as text, as soon as whole characters are there. Special tokens give no text.

    The text goes on from a prompt, so a first piece keeps its leading space: it divides two words. Constant time a
    token: pieces are bytes, and an incremental UTF-8 decoder keeps the unfinished character.
    """

    __slots__ = ("_decode", "_pieces", "_special")

    def __init__(self, pieces: Sequence[bytes], special: frozenset[int]) -> None:
        self._pieces = pieces
        self._special = special
        self._decode: Callable[..., str] = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        """The characters that `token` completes."""
        if token in self._special or not 0 <= token < len(self._pieces):
            return ""
        return self._decode(self._pieces[token])

    def flush(self) -> str:
        """What is left at the end: an unfinished character becomes U+FFFD."""
        return self._decode(b"", True)


class StopStrings:
    """Lets text through up to the first stop string; holds back any end of it that could become one.

    One Knuth-Morris-Pratt automaton a string (SIAM J. Comput. 6:2, 1977), fed character by character, so that what
    comes out does not depend on how the text was cut. The string that is complete first wins; of two that end at the
    same character, the longer one. `hit` is true from then on, and nothing more comes out.
    """

    __slots__ = ("_failures", "_held", "_states", "_strings", "hit")

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._failures = [_failures(string) for string in self._strings]
        self._states = [0] * len(self._strings)
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """The text that is now certain to be wanted."""
        if self.hit:
            return ""
        if not self._strings:
            return piece
        text = self._held + piece
        for index in range(len(self._held), len(text)):
            length = self._advance(text[index])
            if length:
                self.hit = True
                self._held = ""
                return text[: index + 1 - length]
        keep = len(text) - max(self._states)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """What was held back and is wanted after all, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """The length of the longest stop string that `character` completes; 0 = none."""
        longest = 0
        for number, string in enumerate(self._strings):
            state, failures = self._states[number], self._failures[number]
            while state and string[state] != character:
                state = failures[state - 1]
            if string[state] == character:
                state += 1
            if state == len(string):
                longest = max(longest, state)
                state = failures[state - 1]
            self._states[number] = state
        return longest


def _failures(string: str) -> list[int]:
    """For each prefix, the length of its longest proper border."""
    table = [0] * len(string)
    border = 0
    for index in range(1, len(string)):
        while border and string[index] != string[border]:
            border = table[border - 1]
        if string[index] == string[border]:
            border += 1
        table[index] = border
    return table


def _pieces(tokenizer: Any) -> tuple[list[bytes], frozenset[int], bool]:
    """(bytes by token id, special ids, whether a text's first space is the tokenizer's own).

    Raises TokenizerError for a decoder that is neither byte-level nor SentencePiece's."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else None
    kinds = _decoder_kinds(decoder)
    byte_level = "ByteLevel" in kinds
    if not byte_level and not {"ByteFallback", "Metaspace"} & kinds:
        raise TokenizerError(f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not served")
    added = tokenizer.get_added_tokens_decoder()
    letters = str.maketrans({letter: chr(byte) for letter, byte in _byte_letters().items()})
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for piece, token in vocabulary.items():
        if token in added:
            pieces[token] = piece.encode()
        elif byte_level:
            pieces[token] = piece.translate(letters).encode("latin-1", "ignore")
        elif match := _BYTE.fullmatch(piece):
            pieces[token] = bytes([int(match[1], 16)])
        else:
            pieces[token] = piece.replace(_SPACE, " ").encode()
    special = frozenset(token for token, mark in added.items() if mark.special)
    return pieces, special, not byte_level and _strips(decoder)


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if not decoder:
        return set()
    return {decoder["type"]}.union(*(_decoder_kinds(part) for part in decoder.get("decoders", [])))


def _strips(decoder: dict[str, Any] | None) -> bool:
    if not decoder:
        return False
    if decoder["type"] == "Metaspace":
        return bool(decoder.get("prepend_scheme", "always") != "never")
    return decoder["type"] == "Strip" or any(_strips(part) for part in decoder.get("decoders", []))


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is what is inside."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _template(directory: Path) -> jinja2.Template:
    """The chat template, compiled in the sandbox as transformers compiles it. Raises TokenizerError."""

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string((directory / "chat_template.jinja").read_text(encoding="utf-8"))
    except (OSError, jinja2.TemplateError) as error:
        raise TokenizerError(f"the chat template does not compile: {error}") from error
