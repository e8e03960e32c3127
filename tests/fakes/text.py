"""ByteText: a tokenizer for tests that needs no file: token = byte, so that UTF-8 is split at every step."""

import codecs
from collections.abc import Sequence

from engine.errors import RequestError

EOS = 256
VOCAB = 260


class ByteDetokenizer:
    """Holds back the bytes of an unfinished character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < EOS else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteText:
    """What daemon.api needs of engine.text.Text."""

    vocab_size = VOCAB

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if any("bad template" in m["content"] for m in messages):
            raise RequestError("the chat template refused the messages")
        return list("".join(f"<{m['role']}>{m['content']}" for m in messages).encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t < EOS).decode("utf-8", "replace")

    def offsets(self, tokens: Sequence[int]) -> list[int]:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        found, at = [], 0
        for token in tokens:
            found.append(at)
            at += len(decode(self.token_bytes(token)))
        return found

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < EOS else b""

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer()

    def stops(self, strings: Sequence[str]) -> "PlainStops":
        return PlainStops(strings)


class PlainStops:
    """The rule written down plainly: hold back the longest end of the text that begins a stop string."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        if self.hit:
            return ""
        self._held += piece
        found = [at for s in self._strings if (at := self._held.find(s)) >= 0]
        if found:
            self.hit = True
            return self._held[: min(found)]
        keep = max(
            (n for s in self._strings for n in range(1, len(s)) if self._held.endswith(s[:n])),
            default=0,
        )
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        out, self._held = ("" if self.hit else self._held), ""
        return out
