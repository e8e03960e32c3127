"""What the API needs of a tokenizer: protocols that `engine.text` fulfils and tests can fake."""

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Turns one choice's tokens into text; never gives a part of a character."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Stops(Protocol):
    """Holds back whatever could become a stop string. `hit` is true from the first match on."""

    hit: bool

    def push(self, piece: str) -> str: ...

    def flush(self) -> str: ...


class TextPort(Protocol):
    """`encode` and `encode_chat` raise engine.errors.RequestError or TokenizerError for what they cannot encode."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def offsets(self, tokens: Sequence[int]) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def detokenizer(self) -> Detokenizer: ...

    def stops(self, strings: Sequence[str]) -> Stops: ...
