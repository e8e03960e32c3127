"""No word of a client is kept anywhere. Canaries go in by every door of a daemon that has everything on; afterwards
every byte that it left or sent is searched for them: state and runtime directories, log, traces and metrics, the feed
of events, snapshots, incidents with their stacks, and the doctor's bundle."""

import contextlib
import gzip
import http.client
import json
import re
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.collector import Collector
from tests.fakes.tiny import prepare_tiny, write_tiny
from tests.served import INFERD, ROOT, Served, wait_for

PATIENCE_S = 90.0
DEADLINE_S = 4.0
MARK = b"cnry"
KEY = "cnrykeyq8v"
CONTROL = ("snapshot", "snapshot?include=requests,kv", "config", "incidents", "decisions", "tuner")


def canary(where: str) -> str:
    return f"cnry{where}q8v"


class Feed:
    """Everything that the feed of events says, as bytes."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.heard = bytearray()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        from telemetry.client import Client, ClientError, Endpoint
        from telemetry.feed import to_sse

        with contextlib.suppress(ClientError, OSError):
            for event in Client(Endpoint(socket=self._served.runtime / "control.sock")).feed():
                self.heard += to_sse(event)

    def stop(self) -> bytes:
        self._thread.join(PATIENCE_S)
        return bytes(self.heard)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("canaries")
    model = write_tiny("llama", directory / "tiny", vocab_size=12288, intermediate_size=1024)
    prepare_tiny(directory / "tiny", model)
    flags = ("--drill", "all", "--log-format", "json", "--memory-limit", "2GiB")
    settings = {
        "INFERD_SERVED_MODEL_NAME": "tiny",
        "INFERD_PROGRESS_DEADLINE": str(DEADLINE_S),
        "INFERD_SAMPLE_REQUESTS": "1",
        "INFERD_LOG_LEVEL": "debug",
        "INFERD_SLOW_REQUEST": "0.001",
        "INFERD_API_KEY": KEY,
        "INFERD_MAX_NUM_SEQS": "16",
        "INFERD_TUNER": "false",
    }
    with Served(
        directory, str(directory / "tiny"), *flags, env={**collector.environ("http/protobuf"), **settings}
    ) as it:
        yield it


def send(served: Served, path: str, body: Any, key: str = KEY, **headers: str) -> tuple[int, bytes]:
    """A POST whose body is bytes, or JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        sent = {"content-type": "application/json", "authorization": f"Bearer {key}", **headers}
        connection.request("POST", path, data, sent)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def completion(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": canary("prompt"), "max_tokens": 4, "ignore_eos": True, **more}


def by_every_door(served: Served) -> None:
    """Answered and refused: each parameter that carries a client's word does so here."""
    messages = [
        {"role": "system", "content": canary("system")},
        {"role": "user", "content": canary("user"), "name": canary("name")},
        {"role": "assistant", "content": [{"type": "text", "text": canary("part")}]},
    ]
    chat = {"model": "tiny", "messages": messages, "max_tokens": 4, "user": canary("userfield")}
    extra = {
        "stop": [canary("stop")],
        "metadata": {canary("metakey"): canary("metavalue")},
        "cache_salt": canary("salt"),
    }
    del messages[1]["name"]
    assert send(served, "/v1/chat/completions", {**chat, **extra})[0] == 200
    assert send(served, "/v1/chat/completions", {**chat, **extra, "stream": True, "n": 2})[0] == 200
    assert send(served, "/v1/completions", completion(**extra, logprobs=2, echo=True))[0] == 200
    assert send(served, "/tokenize", {"prompt": canary("tokenize")})[0] == 200
    for path, body in (
        ("/v1/completions", completion(model=canary("model"))),
        ("/v1/completions", completion(**{canary("field"): 1})),
        ("/v1/completions", completion(temperature=canary("type"))),
        ("/v1/completions", completion(logit_bias={canary("bias"): 1})),
        ("/v1/completions", completion(prompt=canary("long") * 4000)),
        ("/v1/chat/completions", {**chat, "messages": [{"role": canary("role"), "content": canary("content")}]}),
        ("/v1/chat/completions", {**chat, "tools": [{"type": "function", "function": {"name": canary("tool")}}]}),
        ("/v1/chat/completions", {**chat, "response_format": {"type": canary("format")}}),
        ("/v1/completions", b'{"prompt": "' + canary("torn").encode()),
        (f"/v1/{canary('path')}?{canary('query')}=1", {}),
    ):
        status, answer = send(served, path, body)
        assert 400 <= status < 500, (path, body, answer)
    assert send(served, "/v1/completions", completion(), key=canary("wrongkey"))[0] == 401
    odd = {"traceparent": canary("trace"), "tracestate": f"v={canary('state')}", "user-agent": canary("agent")}
    assert send(served, "/v1/completions", completion(), **odd)[0] == 200
    assert send(served, "/v1/completions", completion(), **{"content-type": canary("mime")})[0] == 415


def leave(served: Served) -> None:
    """In the middle of a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
    body = json.dumps(completion(prompt=canary("left"), max_tokens=400, stream=True))
    connection.request(
        "POST", "/v1/completions", body, {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    )
    assert connection.getresponse().readline().startswith(b"data: ")
    connection.close()


def raise_incident(served: Served, drill: str, kind: str) -> None:
    """A drill under load: the requests that run meanwhile are in its bundle."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                send(served, "/v1/completions", completion(prompt=canary("victim"), max_tokens=60))

    def bundled() -> bool:
        found = json.loads(served.control("/inferd/v1/incidents")[1])
        names = [each["incident_id"] for each in found["incidents"] if each["kind"] == kind]
        return bool(set(names) & set(found["bundles"]))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        assert served.control(f"/inferd/v1/drill/{drill}", "POST", {})[0] == 200
        wait_for(bundled, PATIENCE_S, f"{drill}: a bundle of kind {kind}")
    finally:
        over.set()
    with contextlib.suppress(OSError, ValueError):
        served.control("/inferd/v1/drill/none", "POST", {})
    for thread in threads:
        thread.join(PATIENCE_S)
    served.wait_ready(PATIENCE_S)


def doctors_bundle(served: Served) -> Path:
    file = served.directory / "doctor.tar.gz"
    done = subprocess.run(
        [*INFERD, "doctor", "--socket", str(served.runtime / "control.sock"), "--bundle", str(file)],
        cwd=ROOT, capture_output=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert file.exists(), done.stderr
    return file


def everything(served: Served, said: dict[str, bytes], bundle: Path) -> Iterator[tuple[str, bytes]]:
    yield from said.items()
    yield "log", served.log_path.read_bytes()
    for folder in (served.state, served.runtime):
        for file in folder.rglob("*"):
            if file.is_file():
                data = file.read_bytes()
                yield str(file), gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    with tarfile.open(bundle) as archive:
        for member in archive.getmembers():
            opened = archive.extractfile(member)
            if opened is not None:
                yield f"{bundle}:{member.name}", opened.read()


@pytest.mark.timeout(400)
def test_no_word_of_a_client_is_anywhere_in_what_the_daemon_keeps_or_sends(
    served: Served, collector: Collector
) -> None:
    assert served.control("/inferd/v1/trace-level", "POST", {"level": "detail"})[0] == 200
    feed = Feed(served)
    tokens = json.loads(send(served, "/tokenize", {"prompt": canary("prompt")})[1])["tokens"]
    by_every_door(served)
    leave(served)
    raise_incident(served, "capacity", "oom")
    raise_incident(served, "wedge", "wedged")  # with the stacks of both processes
    raise_incident(served, "kill_engine", "killed")
    by_every_door(served)
    said = {path: served.control(f"/inferd/v1/{path}")[1] for path in CONTROL}
    said["memory"] = served.control("/inferd/v1/memory/snapshot", "POST", {})[1]
    said["metrics"] = served.control("/metrics")[1]
    for each in json.loads(said["incidents"])["incidents"]:
        said[each["incident_id"]] = served.control(f"/inferd/v1/incidents/{each['incident_id']}")[1]
    bundle = doctors_bundle(served)
    served.stop()
    said |= {"feed": feed.stop(), "collector": b"".join(collector.payloads)}
    assert b"RequestSample" in said["feed"]
    assert b"inferd.stage.prefill" in said["collector"]
    assert re.search(rb'"mappings":\{"', said["memory"])
    places = dict(everything(served, said, bundle))
    names = " ".join(places)
    assert all(part in names for part in ("journal.jsonl", "daemon.ring", "engine.ring", "incidents/")), names
    as_tokens = [json.dumps(tokens)[1:-1].encode(), json.dumps(tokens, separators=(",", ":"))[1:-1].encode()]
    for place, data in places.items():
        found = {match.group() for match in re.finditer(MARK + rb"[a-z]+", data)}
        assert not found, f"{place} has {found}: {data[max(0, data.index(MARK) - 200) : data.index(MARK) + 60]!r}"
        assert not any(ids in data for ids in as_tokens), f"{place} has a prompt's token ids"
