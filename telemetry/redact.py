"""Redaction: a request's body without anything that its client wrote: structure, parameters and lengths are left.

Owns which names and words are ours to repeat; all that is not known to be harmless is replaced by its length, and names
that are not known by their number. A digest under a salt that is never written down shows which texts of one daemon's
life were the same, and nothing else. It must not know routes. Enter at `Redactor.body`; `RequestSampler` publishes it
for a share of the requests, if an operator asks for that.
"""

import hashlib
import random
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from telemetry.events import Event, RequestSample

# Parameters of OpenAI's API (daemon/api/schema.py) that are numbers or switches, and are kept as they are.
NUMBERS: Final = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("seed", "max_tokens", "max_completion_tokens", "min_tokens", "n", "priority", "logprobs", "top_logprobs"),
        *("ignore_eos", "return_token_ids", "stream", "include_usage", "include_obfuscation", "echo", "best_of"),
        *("store", "parallel_tool_calls"),
    )
)
# Those with something else in them, of which the shape is told.
TEXTS: Final = frozenset(
    (
        *("model", "messages", "prompt", "role", "content", "name", "type", "text", "stop", "stream_options"),
        *("cache_salt", "user", "suffix", "response_format", "modalities", "tool_choice", "function_call"),
    )
)
# Those whose very names are the client's: only the number of entries is told.
OPAQUE: Final = frozenset(("logit_bias", "metadata", "tools", "functions", "stop_token_ids"))
WORDS: Final = {
    "role": frozenset(("system", "developer", "user", "assistant", "tool")),
    "type": frozenset(("text", "json_object", "json_schema", "function")),
}
_DEPTH = 6
_MOST_ITEMS = 32  # of one list that are shown


class Redactor:
    """`salt` keys the digests; by default one that ends with the process."""

    def __init__(self, salt: bytes | None = None) -> None:
        self._salt = salt or secrets.token_bytes(32)

    def body(self, data: bytes) -> dict[str, Any]:
        """What may be kept of a request's body. One that is no JSON object has a length only."""
        try:
            value = msgspec.json.decode(data)
        except msgspec.DecodeError:
            return {"bytes": len(data)}
        return {"bytes": len(data), **self._object(value, _DEPTH)} if isinstance(value, dict) else {"bytes": len(data)}

    def _object(self, value: dict[str, Any], depth: int) -> dict[str, Any]:
        known = NUMBERS | TEXTS | OPAQUE
        kept = {name: self._value(name, each, depth) for name, each in value.items() if name in known}
        unknown = len(value) - len(kept)
        return {**kept, "unknown_fields": unknown} if unknown else kept

    def _value(self, name: str, value: Any, depth: int) -> Any:
        if value is None or (name in NUMBERS and isinstance(value, bool | int | float)):
            return value
        if isinstance(value, bool | int | float):
            return {"numbers": 1}
        if isinstance(value, str):
            return value if value in WORDS.get(name, ()) else self._text(value)
        if name in OPAQUE or not depth:
            return {"entries": len(value)}
        if isinstance(value, dict):
            return self._object(value, depth - 1)
        if value and all(isinstance(each, int) for each in value):  # token ids are text too
            return {"tokens": len(value), "digest": self._digest(msgspec.json.encode(value))}
        shown = [self._value(name, each, depth - 1) for each in value[:_MOST_ITEMS]]
        return [*shown, {"more": len(value) - _MOST_ITEMS}] if len(value) > _MOST_ITEMS else shown

    def _text(self, value: str) -> dict[str, Any]:
        return {"chars": len(value), "digest": self._digest(value.encode("utf-8", "surrogatepass"))}

    def _digest(self, data: bytes) -> str:
        return hashlib.blake2b(data, digest_size=6, key=self._salt).hexdigest()


class RequestSampler:
    """Publishes the redacted bodies of a `share` (0-1) of the requests; the journal keeps them."""

    def __init__(
        self, publish: Callable[[Event], None], share: float, chance: Callable[[], float] = random.random
    ) -> None:
        self._publish = publish
        self._share = share
        self._chance = chance
        self._redactor = Redactor()

    def take(self, request_id: str, operation: str, data: bytes) -> None:
        """The body of one request, as it came; whether or not it is then refused."""
        if self._chance() < self._share:
            body = self._redactor.body(data)
            self._publish(RequestSample(at_ns=time.monotonic_ns(), group_id=request_id, operation=operation, body=body))
