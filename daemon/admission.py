"""Admission: who may ask (keys, hosts, origins) and how much may wait (requests, tokens).

Owns the keys' digests and the account of what waits and runs. It must not know bodies, text or the engine; how many
rows it has is told to it. Enter at `Keys`, `FrontDoor` and `Queue`.
"""

import hashlib
import hmac
import ipaddress
import logging
import math
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

from daemon.api.errors import ApiError
from engine.errors import ConfigError

_RATE_WINDOW_S = 60.0
_RETRY_MAX_S = 60

log = logging.getLogger("inferd.admission")


class Keys:
    """A set of secrets, kept as digests; `allows` takes the same time whichever key matches, or none."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(secret.encode()).digest() for secret in secrets)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def allows(self, authorization: str | None) -> bool:
        """Whether an Authorization header carries one of the keys (scheme Bearer)."""
        scheme, _, token = (authorization or "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found and scheme.lower() == "bearer"

    @classmethod
    def load(cls, file: str | None, inline: str | None) -> "Keys":
        """From a file (a key a line, # begins a comment) and a setting that came by the environment."""
        secrets = [inline] if inline else []
        if file:
            try:
                lines = Path(file).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"cannot read the key file {file}: {error}") from error
            found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
            if not found:
                raise ConfigError(f"the key file {file} has no key", "put one key on each line")
            if Path(file).stat().st_mode & stat.S_IROTH:
                log.warning("every user of this machine can read the key file %s: chmod 600 it", file)
            secrets += found
        return cls(secrets)


def is_loopback(host: str) -> bool:
    """Whether binding to `host` reaches this machine only."""
    if host.lower() in ("localhost", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class FrontDoor:
    """Which Host and Origin headers are answered. Without keys a web page elsewhere could reach a loopback API through
    the user's browser (directly, or by DNS rebinding), so foreign ones are refused unless they were allowed."""

    def __init__(self, *, keyless: bool, host: str, origins: Iterable[str]) -> None:
        self._keyless = keyless
        self._host = host.lower()
        self.origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        self._hosts = frozenset(urlsplit(origin).netloc for origin in self.origins)

    def check(self, host: str | None, origin: str | None) -> None:
        """Raises ApiError (403) for a stranger."""
        if not self._keyless or "*" in self.origins:
            return
        if host is not None and not self._known_host(host.lower()):
            raise ApiError(403, "this Host is not served here: see --allow-origin", code="foreign_host")
        if origin is not None and not self.allows_origin(origin) and urlsplit(origin).netloc != host:
            raise ApiError(403, "this Origin is not allowed: see --allow-origin", code="foreign_origin")

    def allows_origin(self, origin: str) -> bool:
        """Whether the operator named this origin (or all)."""
        return "*" in self.origins or origin.lower() in self.origins

    def _known_host(self, netloc: str) -> bool:
        try:
            name = urlsplit(f"//{netloc}").hostname or ""
        except ValueError:
            return False
        return is_loopback(name) or name == self._host or netloc in self._hosts


class Ticket:
    """The place of one HTTP request in the queue and, later, among those that run. Close it, whatever happens."""

    __slots__ = ("_queue", "choices", "closed", "tokens", "waiting")

    def __init__(self, queue: "Queue") -> None:
        self._queue = queue
        self.choices = 1
        self.tokens = 0
        self.waiting = 1  # of its choices
        self.closed = False

    def charge(self, choices: int, tokens: int) -> None:
        """The body is known now: `choices`, and `tokens` of prompt. Raises ApiError (429) if that is too much; who was
        charged before it was held is not charged again."""
        if not self.tokens:
            self._queue.charge(self, choices, tokens)

    def started(self) -> None:
        """One choice has its first output: it waits no more."""
        if self.waiting:
            self.waiting -= 1
            self._queue.waiting_choices -= 1
            self._queue.running_choices += 1
            if not self.waiting:
                self._queue.waiting_tokens -= self.tokens
                self.tokens = 0

    def close(self, *, served: bool) -> None:
        if not self.closed:
            self.closed = True
            while self.waiting:
                self.started()
            self._queue.running_choices -= self.choices
            self._queue.open_requests -= 1
            if served:
                self._queue.note_served(self.choices)


class Queue:
    """What waits for its first token: bounded by choices and by prompt tokens, beyond the rows that are free."""

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        rows: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._rows = rows
        self._clock = clock
        self._served: deque[tuple[float, int]] = deque()
        self.open_requests = 0
        self.waiting_choices = 0
        self.running_choices = 0
        self.waiting_tokens = 0
        self.shed_total = 0

    def enter(self) -> Ticket:
        """Take a place, before the body is read: what cannot wait costs nothing more. Raises ApiError (429)."""
        if self.waiting_choices >= self._room():
            raise self._shed("too many requests wait already", "queue_full")
        self.waiting_choices += 1
        self.open_requests += 1
        return Ticket(self)

    def charge(self, ticket: Ticket, choices: int, tokens: int) -> None:
        others = self.waiting_choices - ticket.waiting
        if others and others + choices > self._room():
            raise self._shed("too many requests wait already", "queue_full")
        # One request alone may always wait, however long: the context limit bounds it.
        if self.waiting_tokens and self.waiting_tokens + tokens > self._max_tokens:
            raise self._shed("too many prompt tokens wait already", "queue_full_tokens")
        self.waiting_choices += choices - ticket.waiting
        self.waiting_tokens += tokens
        ticket.waiting = ticket.choices = choices
        ticket.tokens = tokens

    def note_served(self, choices: int) -> None:
        now = self._clock()
        self._served.append((now, choices))
        self._forget(now)

    def retry_after_s(self) -> int:
        """In how many seconds what waits now should have been served, judged by the last minute."""
        now = self._clock()
        self._forget(now)
        if not self._served:
            return 1
        rate = sum(choices for _, choices in self._served) / max(1.0, now - self._served[0][0])
        return min(_RETRY_MAX_S, max(1, math.ceil(self.waiting_choices / rate)))

    def sizes(self) -> dict[str, int]:
        return {
            "admission_open": self.open_requests,
            "admission_waiting": self.waiting_choices,
            "admission_waiting_tokens": self.waiting_tokens,
            "admission_served_window": len(self._served),
        }

    def _room(self) -> int:
        return self._max_requests + max(0, self._rows() - self.running_choices)

    def _shed(self, message: str, code: str) -> ApiError:
        self.shed_total += 1
        return ApiError(429, message, code=code, retry_after_s=self.retry_after_s())

    def _forget(self, now: float) -> None:
        while self._served and (now - self._served[0][0] > _RATE_WINDOW_S or len(self._served) > 4096):
            self._served.popleft()
