"""TokenMixer: which tokens traffic is made of, so that two days can be compared and nobody's text can be read from it.

Owns the counts since the last TokenMix. Token ids are folded into 256 buckets by a hash under a salt of this
installation, and only the sum over at least a hundred choices is ever published. It must not know text or requests.
Enter at `prompt`, `output` and `ended`; not thread-safe.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from telemetry.events import Event, TokenMix

BUCKETS: Final = 256
LEAST_REQUESTS: Final = 100
_PRIME: Final = 2**61 - 1
_SALT_BYTES: Final = 16


class TokenMixer:
    """Publishes a TokenMix whenever `LEAST_REQUESTS` more choices have ended."""

    def __init__(self, publish: Callable[[Event], None], salt: bytes) -> None:
        self._publish = publish
        half = len(salt) // 2
        self._factor = int.from_bytes(salt[:half], "little") % (_PRIME - 1) + 1
        self._shift = int.from_bytes(salt[half:], "little") % _PRIME
        self._prompt: Counter[int] = Counter()  # by token: no larger than the vocabulary
        self._output: Counter[int] = Counter()
        self._requests = 0

    def prompt(self, tokens: Iterable[int]) -> None:
        self._prompt.update(tokens)

    def output(self, tokens: Iterable[int]) -> None:
        self._output.update(tokens)

    def ended(self) -> None:
        """A choice is over; what it added is in. What is not a hundred choices yet is never told."""
        self._requests += 1
        if self._requests < LEAST_REQUESTS:
            return
        self._publish(
            TokenMix(
                at_ns=time.monotonic_ns(),
                requests=self._requests,
                prompt=self._folded(self._prompt),
                output=self._folded(self._output),
            )
        )
        self._prompt.clear()
        self._output.clear()
        self._requests = 0

    def sizes(self) -> dict[str, int]:
        return {"mix_tokens": len(self._prompt) + len(self._output)}

    def _folded(self, counts: Counter[int]) -> tuple[int, ...]:
        """Sums by bucket: a universal hash (Carter and Wegman 1979), which the salt chooses."""
        sums = [0] * BUCKETS
        for token, count in counts.items():
            sums[(self._factor * (token + 1) + self._shift) % _PRIME % BUCKETS] += count
        return tuple(sums)


def install_salt(path: Path) -> bytes:
    """The salt at `path`, made on first use and readable by its owner alone; one for this life where the disk does not
    take it, or what lies there is too short."""
    try:
        found = path.read_bytes()
        if len(found) >= _SALT_BYTES:
            return found
    except OSError:
        found = b""
    salt = secrets.token_bytes(_SALT_BYTES)
    try:
        path.touch(mode=0o600)
        path.write_bytes(salt)
    except OSError:
        return salt  # counts of another life will not compare: that is all
    return salt
