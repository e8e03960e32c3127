"""The client finds a daemon and reads it, over a unix socket and over TCP; what goes wrong is one clear error."""

import http.server
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from telemetry import events, snapshot
from telemetry.client import Client, ClientError, Endpoint, candidates, find
from telemetry.feed import to_sse
from telemetry.fold import Fold

SENT = [events.StateChanged(at_ns=i, state="ready", why=f"ünï {i}\n") for i in range(3)]


class Handler(http.server.BaseHTTPRequestHandler):
    """A daemon with a snapshot, one record, a feed, and one route that needs a key."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/inferd/v1/events":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            later = b'event: Later\ndata: {"event":"Later","at_ns":1}\n\n'
            text = b": hello\n\n" + to_sse(SENT[0]) + later + to_sse(SENT[1]) + to_sse(SENT[2])
            for at in range(0, len(text), 17):  # frames do not follow events
                piece = text[at : at + 17]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
            return
        known = {
            "/inferd/v1/snapshot?include=state%2Cqueue": snapshot.encode(snapshot.build(Fold("m"), ["state", "queue"])),
            "/inferd/v1/requests/a%2Fb": b"not json",
            "/metrics": b"up 1\n",
        }
        if self.path == "/inferd/v1/config" and self.headers.get("Authorization") == "Bearer secret":
            self._answer(200, b"{}")
        elif self.path in known:
            self._answer(200, known[self.path])
        else:
            self._answer(404, b'{"error":"no such thing"}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b'{"got":%s}' % (body or b"null"))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "test"

    def log_message(self, format: str, *args: object) -> None:
        pass


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class TcpServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True


@pytest.fixture(params=["unix", "tcp"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Endpoint]:
    server: socketserver.BaseServer
    if request.param == "unix":
        server = UnixServer(str(tmp_path / "control.sock"), Handler)
        found = Endpoint(socket=tmp_path / "control.sock")
    else:
        tcp = TcpServer(("127.0.0.1", 0), Handler)
        found, server = Endpoint(url=f"http://127.0.0.1:{tcp.server_address[1]}", key="secret"), tcp
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()


def test_it_reads_what_the_daemon_says(endpoint: Endpoint) -> None:
    client = Client(endpoint)
    shot = client.snapshot(["state", "queue"])
    assert (shot.model, shot.limits) == ("m", None)
    assert shot.queue is not None
    assert client.metrics() == "up 1\n"
    assert client.post("/inferd/v1/tuner", {"freeze": True}) == {"got": {"freeze": True}}
    assert client.post("/inferd/v1/drain") == {"got": None}


def test_the_feed_gives_events_and_skips_those_of_a_later_version(endpoint: Endpoint) -> None:
    client = Client(endpoint)
    assert list(client.feed()) == SENT
    assert client.unknown_events == 1


def test_the_key_goes_with_a_url(endpoint: Endpoint) -> None:
    if endpoint.key:
        assert Client(endpoint).get("/inferd/v1/config") == b"{}"
    else:
        with pytest.raises(ClientError, match="404"):
            Client(endpoint).get("/inferd/v1/config")


def test_what_goes_wrong_says_where_and_what(endpoint: Endpoint) -> None:
    client = Client(endpoint)
    with pytest.raises(ClientError, match="no such thing") as caught:
        client.get("/nowhere")
    assert caught.value.status == 404
    with pytest.raises(ClientError, match="something else"):
        client.record("a/b")


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="does not answer"):
        Client(Endpoint(socket=tmp_path / "none.sock")).snapshot()
    with pytest.raises(ClientError, match="URL"):
        Client(Endpoint(url="localhost")).snapshot()


def listening(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen(16)
    return server


def test_finding_asks_the_flags_then_the_variable_then_looks_around(tmp_path: Path) -> None:
    runtime = tmp_path / "u"
    environ = {"XDG_RUNTIME_DIR": str(runtime)}
    assert find("/x.sock", "", environ=environ, root=tmp_path).socket == Path("/x.sock")
    assert find("", "http://h:1", "k", environ, tmp_path) == Endpoint(url="http://h:1", key="k")
    assert find(environ={**environ, "INFERD_SOCKET": "/y.sock"}, root=tmp_path).socket == Path("/y.sock")
    with pytest.raises(ClientError, match="no running inferd"):
        find(environ=environ, root=tmp_path)
    with listening(runtime / "inferd" / "control.sock"):
        assert find(environ=environ, root=tmp_path).socket == runtime / "inferd" / "control.sock"
        with listening(tmp_path / "run" / "inferd-a" / "control.sock"):
            with pytest.raises(ClientError, match="several daemons") as caught:
                find(environ=environ, root=tmp_path)
            assert "inferd-a" in str(caught.value)
        # A socket that nobody listens on is a leftover.
        assert len(candidates(environ, tmp_path)) == 3
        unit = {"XDG_RUNTIME_DIR": "/nowhere", "RUNTIME_DIRECTORY": f"{runtime / 'inferd'}:/other"}
        assert find(environ=unit, root=tmp_path / "none").socket == runtime / "inferd" / "control.sock"
        assert find(environ=environ, root=tmp_path).socket == runtime / "inferd" / "control.sock"
