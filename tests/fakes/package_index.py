"""A package index on a free port, with a wheel that holds a GGUF; it can misbehave, and remembers what was asked."""

import hashlib
import json
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from daemon.wheels import WheelModel

WHEEL = "llm_tiny-1.0-py3-none-any.whl"
MEMBER = "llm_tiny/tiny.gguf"


@dataclass
class PackageIndex:
    """`ranges`: it resumes downloads; `cut_at`: bytes after which it hangs up, once; `slow_s`: before a wheel."""

    wheel: bytes
    sha256: str  # as the index says it
    html: bool = False
    ranges: bool = True
    cut_at: int = 0
    slow_s: float = 0.0
    failures: list[int] = field(default_factory=list)  # statuses of the next wheel requests
    asked: list[tuple[str, str]] = field(default_factory=list)  # (path, Range)
    url: str = ""

    @property
    def downloads(self) -> list[str]:
        """The Range header of each request for the wheel."""
        return [ranged for path, ranged in self.asked if path.endswith(".whl")]

    def page(self) -> tuple[str, bytes]:
        if self.html:
            return "text/html", f'<a href="../files/{WHEEL}#sha256={self.sha256}">{WHEEL}</a>'.encode()
        file = {"filename": WHEEL, "url": f"../files/{WHEEL}", "hashes": {"sha256": self.sha256} if self.sha256 else {}}
        return "application/vnd.pypi.simple.v1+json", json.dumps({"files": [file]}).encode()


def make_wheel(path: Path, gguf: Path) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, MEMBER)
        archive.writestr("llm_tiny/__init__.py", "raise SystemExit('nothing of a wheel is run')")
    return path.read_bytes()


def catalogue_of(gguf: Path) -> dict[str, WheelModel]:
    """A catalogue whose one model, 'tiny', is this file."""
    model = WheelModel(
        name="tiny",
        about="a tiny model",
        project="llm-tiny",
        version="1.0",
        member=MEMBER,
        sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        download_bytes=1,
    )
    return {"tiny": model}


@contextmanager
def serving(index: PackageIndex) -> Iterator[PackageIndex]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.asked.append((self.path, self.headers.get("Range", "")))
            if self.path.endswith(".whl"):
                self._wheel()
            elif self.path == "/simple/llm-tiny/":
                self._answer(200, *index.page())
            else:
                self._answer(404, "text/plain", b"")

        def _wheel(self) -> None:
            time.sleep(index.slow_s)
            if index.failures:
                self._answer(index.failures.pop(0), "text/plain", b"")
                return
            ranged = self.headers.get("Range", "") if index.ranges else ""
            start = int(ranged.removeprefix("bytes=").removesuffix("-")) if ranged else 0
            if start >= len(index.wheel):
                self._answer(416, "text/plain", b"")
                return
            body = index.wheel[start:]
            self.send_response(206 if ranged else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if index.cut_at:
                body, index.cut_at = body[: index.cut_at], 0
                self.close_connection = True
            self.wfile.write(body)

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
