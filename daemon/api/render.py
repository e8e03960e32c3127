"""Answers as OpenAI's API shapes them: whole bodies and stream chunks, for chat and for completions.

Owns field names and JSON. It must not know sockets or the engine. Enter at `Renderer`. The unchanging part of a chunk
is encoded once a response, so that a token costs one small JSON string.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from daemon.api.choice import Choice, Entry
from daemon.api.textport import TextPort

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
_NO_LOGPROB = -9999.0  # JSON has no infinity


class Renderer:
    """One response: `response_id`, `created` (unix seconds) and the served model's name are in each of its parts."""

    def __init__(
        self,
        *,
        chat: bool,
        response_id: str,
        created: int,
        model: str,
        text: TextPort,
        logprobs: bool,
        token_ids: bool = False,
    ) -> None:
        self._chat = chat
        self._text = text
        self._logprobs = logprobs
        self._token_ids = token_ids
        kind = (
            "chat.completion" if chat else "text_completion",
            "chat.completion.chunk" if chat else "text_completion",
        )
        self._envelopes = [{"id": response_id, "object": name, "created": created, "model": model} for name in kind]
        self._head = b"data: " + _encode(self._envelopes[1])[:-1] + b',"choices":[{"index":'
        self._begun: set[int] = set()

    def chunks(self, index: int, choice: Choice) -> bytes:
        """What `choice` has for the client now, as events; nothing, if that is nothing."""
        parts = []
        if index not in self._begun and (choice.text or choice.finish):
            self._begun.add(index)
            if self._chat:
                parts.append(self._chunk(index, b'"delta":{"role":"assistant","content":""}'))
        ending = choice.finish is not None and not choice.closed
        if choice.text:
            content = _encode(choice.text)
            body = b'"delta":{"content":' + content + b"}" if self._chat else b'"text":' + content
            parts.append(self._chunk(index, body, choice.entries))
        if ending:
            assert choice.finish is not None
            choice.closed = True
            entries = [] if choice.text else choice.entries
            body = b'"delta":{}' if self._chat else b'"text":""'
            parts.append(self._chunk(index, body, entries, choice.finish))
        return b"".join(parts)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The one chunk without choices that stream_options.include_usage asks for."""
        return b"data: " + _encode({**self._envelopes[1], "choices": [], "usage": usage}) + b"\n\n"

    def whole(self, choices: Sequence["Whole"], usage: dict[str, Any]) -> bytes:
        """The body of an answer that is not streamed."""
        return _encode(
            {
                **self._envelopes[0],
                "choices": [self._whole_choice(i, whole) for i, whole in enumerate(choices)],
                "usage": usage,
            }
        )

    def _whole_choice(self, index: int, whole: "Whole") -> dict[str, Any]:
        text = "".join(whole.texts)
        logprobs = self._logprobs_of(whole.entries) if self._logprobs else None
        said: dict[str, Any] = {"text": text}
        if self._chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        ids = {"token_ids": whole.tokens} if self._token_ids else {}
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": whole.finish, **ids}

    def _chunk(self, index: int, body: bytes, entries: Sequence[Entry] = (), finish: str | None = None) -> bytes:
        logprobs = _encode(self._logprobs_of(entries)) if entries else b"null"
        reason = b'"' + finish.encode() + b'"' if finish else b"null"
        return b'%s%d,%s,"logprobs":%s,"finish_reason":%s}]}\n\n' % (self._head, index, body, logprobs, reason)

    def _logprobs_of(self, entries: Sequence[Entry]) -> dict[str, Any]:
        if self._chat:
            return {"content": [self._chat_entry(e) for e in entries], "refusal": None}
        tops = [self._top(e) for e in entries]
        return {
            "tokens": [self._token(e.token) for e in entries],
            "token_logprobs": [None if e.logprob is None else _finite(e.logprob.logprob) for e in entries],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [e.offset for e in entries],
        }

    def _chat_entry(self, entry: Entry) -> dict[str, Any]:
        value, top = (0.0, ()) if entry.logprob is None else (entry.logprob.logprob, entry.logprob.top)
        return {**self._named(entry.token, value), "top_logprobs": [self._named(t, v) for t, v in top]}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._token(token), "logprob": _finite(logprob), "bytes": list(self._text.token_bytes(token))}

    def _top(self, entry: Entry) -> dict[str, float] | None:
        """The alternatives by text, best first; two tokens with one text keep the better."""
        if entry.logprob is None or not entry.logprob.top:
            return None
        found: dict[str, float] = {}
        for token, logprob in (*entry.logprob.top, (entry.token, entry.logprob.logprob)):
            found.setdefault(self._token(token), _finite(logprob))
        return found

    def _token(self, token: int) -> str:
        return self._text.token_bytes(token).decode("utf-8", "replace")


class Whole:
    """Collects one choice for an answer that is not streamed."""

    __slots__ = ("entries", "finish", "texts", "tokens")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.entries: list[Entry] = []
        self.tokens: list[int] = []
        self.finish: str | None = None

    def add(self, choice: Choice) -> None:
        if choice.text:
            self.texts.append(choice.text)
        self.entries.extend(choice.entries)
        self.tokens.extend(choice.tokens)
        self.finish = choice.finish


def usage_of(choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
    """Token counts of a whole response. `prompt_tokens` counts each prompt once, however many choices share it."""
    completion = sum(choice.output_tokens for choice in choices)
    cached = sum(choice.facts.cached_tokens for choice in choices if choice.facts and not choice.request.index)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _finite(logprob: float) -> float:
    return logprob if logprob > _NO_LOGPROB else _NO_LOGPROB
