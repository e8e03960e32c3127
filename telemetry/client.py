"""The client: reads a running daemon's snapshot, records and event feed, over its control socket or a URL.

Owns finding the daemon and speaking HTTP to it. Stdlib and msgspec only; blocking: an asyncio program uses it in a
thread. It must not know what is done with what it reads. Enter at `find` and then `Client`.
"""

import http.client
import os
import socket
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from telemetry import feed, snapshot
from telemetry.events import Event, RequestRecord
from telemetry.snapshot import Snapshot

T = TypeVar("T")

SOCKET_NAME = "control.sock"
TIMEOUT_SECONDS = 5.0
FEED_SILENCE_SECONDS = 60.0  # a feed that says nothing for so long, not even a comment, is dead
_BASE = "/inferd/v1"


class ClientError(Exception):
    """The daemon cannot be found or did not answer as asked. `hint` says what to do; `status` 0 is no answer."""

    def __init__(self, message: str, hint: str = "", status: int = 0) -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint
        self.status = status


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a daemon is: a unix socket's path, or an http(s) URL with the admin key."""

    socket: Path | None = None
    url: str = ""
    key: str = ""

    def __str__(self) -> str:
        return str(self.socket) if self.socket else self.url


def find(
    socket_path: str = "",
    url: str = "",
    key: str = "",
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> Endpoint:
    """The daemon to speak to: what was asked for, else $INFERD_SOCKET, else the one of this environment's own
    $RUNTIME_DIRECTORY (a unit's commands), else the one that lives in /run/inferd*/ or in the user's runtime directory.
    Raises ClientError if there is none, or several (it lists them)."""
    if url:
        return Endpoint(url=url, key=key)
    if socket_path or environ.get("INFERD_SOCKET"):
        return Endpoint(socket=Path(socket_path or environ["INFERD_SOCKET"]))
    own = Path(environ.get("RUNTIME_DIRECTORY", "").split(":")[0]) / SOCKET_NAME
    if own.is_absolute() and _answers(own):
        return Endpoint(socket=own)
    live = [path for path in candidates(environ, root) if _answers(path)]
    if not live:
        raise ClientError(
            "no running inferd was found", "start one with `inferd serve`, or name it with --socket or --url"
        )
    if len(live) > 1:
        raise ClientError(f"several daemons run: {', '.join(map(str, live))}", "choose one with --socket")
    return Endpoint(socket=live[0])


def candidates(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[Path]:
    """Where control sockets would be, whether or not they are: services first, then the user's own."""
    services = sorted((root / "run").glob(f"inferd*/{SOCKET_NAME}"))
    runtime = environ.get("XDG_RUNTIME_DIR")
    user = Path(runtime) if runtime else root / "run" / "user" / str(os.getuid())
    fallback = root / "tmp" / f"inferd-{os.getuid()}"  # where there is no runtime directory, as in containers
    return [*services, user / "inferd" / SOCKET_NAME, fallback / SOCKET_NAME]


def _answers(path: Path) -> bool:
    """Somebody accepts connections there: a socket file alone may be a leftover."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


class Client:
    """One daemon. Every call is one HTTP exchange on a connection of its own, and raises ClientError if it fails."""

    def __init__(self, endpoint: Endpoint, timeout_s: float = TIMEOUT_SECONDS) -> None:
        self.endpoint = endpoint
        self.unknown_events = 0  # of a later version, skipped
        self._timeout_s = timeout_s

    def snapshot(self, include: Iterable[str] | None = None, block_map: bool = True) -> Snapshot:
        """The parts in `include`, or all; `kv` without the engine's block map if that is not wanted."""
        asked = {} if include is None else {"include": ",".join(include), **({} if block_map else {"map": "0"})}
        query = "?" + urllib.parse.urlencode(asked) if asked else ""
        return self._decoded(snapshot.decode, self.get(f"{_BASE}/snapshot{query}"))

    def record(self, request_id: str) -> RequestRecord:
        """How a finished request spent its time."""
        body = self.get(f"{_BASE}/requests/{urllib.parse.quote(request_id, safe='')}")
        return self._decoded(lambda data: msgspec.json.decode(data, type=RequestRecord), body)

    def metrics(self) -> str:
        """The exposition, as Prometheus text."""
        return self.get("/metrics").decode()

    def get(self, path: str) -> bytes:
        """The body of any route."""
        return self._exchange("GET", path, None)

    def post(self, path: str, body: Any = None) -> Any:
        """The answer of a control route, decoded."""
        data = b"" if body is None else msgspec.json.encode(body)
        return self._decoded(lambda data: msgspec.json.decode(data), self._exchange("POST", path, data) or b"null")

    def feed(self) -> Iterator[Event]:
        """Events from now on, until the daemon ends the feed. Close the iterator to hang up."""
        connection = self._connect(FEED_SILENCE_SECONDS)
        try:
            response = self._send(connection, "GET", f"{_BASE}/events", None)
            data: list[str] = []
            for line in self._lines(response):
                if line.startswith("data:"):
                    data.append(line[5:].removeprefix(" "))
                elif not line and data:
                    try:
                        event = feed.from_sse("\n".join(data))
                    except msgspec.DecodeError:
                        self.unknown_events += 1
                    else:
                        yield event
                    data.clear()
        finally:
            connection.close()

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[str]:
        while True:
            try:
                line = response.readline()
            except (OSError, http.client.HTTPException) as error:
                raise ClientError(f"{self.endpoint}: the event feed broke off: {error}") from error
            if not line:
                return
            yield line.decode().rstrip("\r\n")

    def _exchange(self, method: str, path: str, body: bytes | None) -> bytes:
        connection = self._connect(self._timeout_s)
        try:
            return self._send(connection, method, path, body).read()
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"{self.endpoint}: {error}") from error
        finally:
            connection.close()

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        """The response with its body unread. Raises ClientError unless its status is 2xx."""
        headers = {"Host": "localhost"} if self.endpoint.socket else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.endpoint.key:
            headers["Authorization"] = f"Bearer {self.endpoint.key}"
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            if 200 <= response.status < 300:
                return response
            text = response.read(4096).decode(errors="replace").strip()
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"{self.endpoint} does not answer: {error}", "is the daemon running?") from error
        raise ClientError(
            f"{self.endpoint}: {response.status} {response.reason} for {path}: {text}", "", response.status
        )

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.endpoint.socket:
            return _UnixConnection(self.endpoint.socket, timeout_s)
        parts = urllib.parse.urlsplit(self.endpoint.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientError(f"{self.endpoint.url!r} is not an http(s) URL")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname, parts.port, timeout=timeout_s)

    def _decoded(self, decode: Callable[[bytes], T], body: bytes) -> T:
        try:
            return decode(body)
        except msgspec.DecodeError as error:
            raise ClientError(f"{self.endpoint} answered something else: {error}", "is it an inferd?") from error


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(str(self._path))
