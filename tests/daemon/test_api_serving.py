"""A whole daemon: states, drain, control socket, admin port; and control answers while the API's loop is blocked."""

import asyncio
import contextlib
import json
import os
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from daemon.control_thread import ControlThread
from daemon.house import Model
from daemon.paths import AddressInUse, AlreadyRunning
from daemon.serving import Daemon
from daemon.settings import load
from engine.errors import ConfigError
from telemetry import snapshot as snapshots
from telemetry.client import Client, ClientError, Endpoint
from telemetry.events import RequestRecord
from tests.fakes.daemon import Made, ScriptedEngine, running
from tests.fakes.port import Script, saying
from tests.fakes.text import ByteText

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def test_live_startup_and_ready_have_three_meanings(tmp_path: Path) -> None:
    async with running(tmp_path, saying("ok"), hold=True) as made:
        for control in (False, True):
            assert (await made.get("/health/live", control=control))[0] == 200
            assert (await made.get("/health/startup", control=control))[0] == 503
            assert (await made.get("/health/ready", control=control))[0] == 503
            assert (await made.get("/metrics", control=control))[0] == 200
        status, body = await made.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (503, "engine_not_ready")
        made.engine.loaded.set()
        async with asyncio.timeout(60):
            while (await made.get("/health/ready"))[0] != 200:
                await asyncio.sleep(0.01)
        assert (await made.get("/health/startup"))[0] == 200
        assert (await made.post("/v1/chat/completions", CHAT))[0] == 200
        made.engine.die()
        assert (await made.get("/health/ready"))[0] == 503
        assert (await made.get("/health/live"))[0] == 200
        assert (await made.get("/health/startup"))[0] == 200, "it has started once: no reason to kill the pod"
        _, view = await made.get("/inferd/v1/snapshot?include=state", control=True)
        assert view["state"]["engine_why"] == "killed (SIGKILL)"
        made.engine.state("ready")
        made.engine.age(3600 * 10**9)
        assert (await made.get("/health/ready"))[0] == 503, "no progress within the deadline"


async def test_stopping_finishes_streams_and_refuses_new_requests(tmp_path: Path) -> None:
    """Case 29."""
    async with running(tmp_path, saying("word " * 19), step_s=0.005) as made:
        async with made.api.post(
            made.addresses.api + "/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 100}
        ) as stream:
            await stream.content.readline()
            made.engine.pause()
            made.daemon.stop()
            async with asyncio.timeout(60):
                while (await made.get("/health/ready"))[0] == 200:
                    await asyncio.sleep(0.005)
            async with made.api.post(made.addresses.api + "/v1/chat/completions", json=CHAT) as refused:
                assert refused.status == 503
                assert int(refused.headers["Retry-After"]) > 0
            assert (await made.get("/health/live"))[0] == 200
            assert not made.done.done()
            made.engine.resume()
            rest = (await stream.read()).decode()
        assert rest.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"stop"' in rest
        assert await asyncio.wait_for(made.done, 60) == 0


async def test_a_stream_that_outlasts_the_grace_is_told_so(tmp_path: Path) -> None:
    async with running(tmp_path, saying("abc" * 30, hang_after=4), settings={"grace": 0.1}) as made:
        async with made.api.post(made.addresses.api + "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
            await stream.content.readline()
            made.daemon.stop()
            rest = (await stream.read()).decode()
        assert json.loads(rest.strip().splitlines()[-1].removeprefix("data: "))["error"]["code"] == "aborted"
        assert await asyncio.wait_for(made.done, 60) == 0


async def test_control_answers_while_the_api_loop_is_blocked(tmp_path: Path) -> None:
    """The loop of this test is the daemon's API loop; it is blocked by waiting for a thread."""
    found: dict[str, Any] = {}

    def look(path: Path) -> None:
        client = Client(Endpoint(socket=path), timeout_s=10.0)
        for name in ("/health/live", "/metrics", "/inferd/v1/snapshot", "/inferd/v1/snapshot?include=kv,requests"):
            begin = time.monotonic()
            found[name] = client.get(name)
            found[name + " s"] = time.monotonic() - begin
        found["account"] = client.post("/inferd/v1/memory/snapshot")
        try:
            client.post("/inferd/v1/drain")
        except ClientError as error:
            found["drain"] = str(error)

    async with running(tmp_path) as made:
        thread = threading.Thread(target=look, args=(made.addresses.control,))
        thread.start()
        thread.join(20)  # blocks this loop on purpose
        assert not thread.is_alive()
        assert b"ok" in found["/health/live"]
        assert b"inferd_requests" in found["/metrics"]
        assert snapshots.decode(found["/inferd/v1/snapshot"]).state is not None
        assert snapshots.decode(found["/inferd/v1/snapshot?include=kv,requests"]).requests is not None
        assert found["account"]["memory"]["daemon_resident_bytes"] > 0
        assert "mappings" not in found["account"], "the engine could not be asked"
        assert found["/health/live s"] < 2
        assert "loop does not answer" in found["drain"]


async def test_the_control_socket_is_this_users_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        assert stat.S_IMODE(made.addresses.control.stat().st_mode) == 0o600
        for path in ("/inferd/v1/snapshot", "/inferd/v1/config"):
            assert (await made.get(path, control=True))[0] == 200
            assert (await made.get(path))[0] == 404, "never on the API port"
    assert not made.addresses.control.exists()


async def test_one_that_listens_there_already_is_told_even_if_it_does_not_answer_any_more(tmp_path: Path) -> None:
    """Stopped, with its queue full: to wait for it would be to wait for ever."""
    held = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control.sock"))
        listener.listen(0)
        for each in held:
            each.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                each.connect(str(tmp_path / "control.sock"))
        with pytest.raises(AlreadyRunning, match="another inferd listens"):
            ControlThread(tmp_path, [], None, [])
        for each in held:
            each.close()


async def test_a_reader_of_the_feed_that_reads_nothing_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.api.sending.SEND_S", 0.3)
    async with running(tmp_path, saying("ok")) as made, asyncio.timeout(60):

        async def readers() -> int:
            _, snapshot = await made.get("/inferd/v1/snapshot?include=sizes", control=True)
            return int(snapshot["sizes"]["daemon"]["feed_readers"])

        reader, writer = await asyncio.open_unix_connection(str(made.addresses.control), limit=1024)
        writer.write(b"GET /inferd/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readline()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        assert await readers() == 1
        while await readers():
            await asyncio.gather(*(made.post("/v1/chat/completions", CHAT) for _ in range(20)))
        writer.close()


async def until_record(made: Made, request_id: str) -> RequestRecord:
    async with asyncio.timeout(60):
        while True:
            status, body = await made.get(f"/inferd/v1/requests/{request_id}", control=True)
            if status == 200:
                return body  # type: ignore[no-any-return]
            await asyncio.sleep(0.02)


async def test_what_control_reads(tmp_path: Path) -> None:
    async with running(tmp_path, saying("ok"), settings={"api_key": "sk-secret", "max_num_seqs": 7}) as made:
        headers = {"Authorization": "Bearer sk-secret", "X-Request-Id": "mine"}
        url = made.addresses.api + "/v1/chat/completions"
        async with made.api.post(url, json=CHAT, headers=headers) as response:
            assert response.status == 200
        record: Any = await until_record(made, "mine")
        assert record["group_id"] == "mine"
        assert sum(record["stages"].values()) == record["at_ns"] - record["arrival_ns"]
        _, config = await made.get("/inferd/v1/config", control=True)
        assert config["max_num_seqs"] == {"value": 7, "source": "flag --max-num-seqs"}
        assert config["api_key"]["value"] == "(set)"
        assert "sk-secret" not in json.dumps(config)
        _, snapshot = await made.get("/inferd/v1/snapshot", control=True)
        assert snapshot["versions"]["inferd"] == "9.9"
        assert snapshot["sizes"]["daemon"]["api_live"] == 0
        assert (await made.get("/inferd/v1/snapshot?include=nonsense", control=True))[0] == 400
        assert (await made.get("/inferd/v1/incidents", control=True))[1] == {"incidents": [], "bundles": []}
        assert (await made.get("/inferd/v1/decisions", control=True))[1] == {"decisions": []}
        assert (await made.get("/inferd/v1/requests/none", control=True))[0] == 404
        assert (await made.get("/inferd/v1/incidents/none", control=True))[0] == 404
        status, refusal = await made.post("/inferd/v1/trace-level", {"level": "detail"}, control=True)
        assert (status, refusal["error"]["code"]) == (409, "traces_not_configured")
        assert (await made.get("/nowhere", control=True))[1]["error"]["code"] == "not_found"


async def test_what_control_does(tmp_path: Path) -> None:
    async with running(tmp_path, saying("abc", hang_after=2)) as made:
        running_request = asyncio.create_task(made.post("/v1/chat/completions", CHAT))
        async with asyncio.timeout(60):
            while not made.engine.running:
                await asyncio.sleep(0.002)
        assert (await made.post("/inferd/v1/drain", control=True))[0] == 200
        assert (await made.post("/v1/chat/completions", CHAT))[0] == 503
        assert (await made.get("/health/ready"))[0] == 503
        assert (await made.post("/inferd/v1/resume", control=True))[0] == 200
        assert (await made.get("/health/ready"))[0] == 200
        assert (await made.post("/inferd/v1/tuner", {"set": {"max_num_seqs": 3}}, control=True))[1]["limits"][
            "max_num_seqs"
        ] == 3
        status, body = await made.post("/inferd/v1/tuner", {"set": {"max_num_seqs": 10**9}}, control=True)
        assert (status, body["error"]["code"]) == (400, "config_error")
        assert (await made.post("/inferd/v1/tuner", {"freeze": True}, control=True))[1]["tuner"]["state"] == "frozen"
        assert (await made.post("/inferd/v1/cache/reset", control=True))[0] == 200
        (request,) = made.engine.seen.requests
        assert (await made.post("/inferd/v1/abort/nobody", control=True))[0] == 404
        assert (await made.post(f"/inferd/v1/abort/{request.id}", control=True))[1] == {"aborted_choices": 1}
        status, body = await running_request
        assert (status, body["error"]["code"]) == (503, "aborted")
        record: Any = await until_record(made, f"{request.id}")
        assert (record["reason"], record["error"]) == ("abort", "aborted")


async def test_events_are_streamed(tmp_path: Path) -> None:
    async with running(tmp_path, saying("ok")) as made, made.control.get("http://inferd/inferd/v1/events") as feed:
        assert (await feed.content.readline()).startswith(b": connected")
        await made.post("/v1/chat/completions", CHAT)
        async with asyncio.timeout(60):
            async for line in feed.content:
                if line.startswith(b"event: RequestRecord"):
                    break


async def test_the_admin_port_is_open_for_probes_and_keyed_for_control(tmp_path: Path) -> None:
    settings = {"admin_port": 0, "admin_key": "root"}
    async with running(tmp_path, settings=settings) as made:
        assert made.addresses.admin is not None
        for path, key, expected in (
            ("/health/live", "", 200),
            ("/metrics", "", 200),
            ("/inferd/v1/config", "", 401),
            ("/inferd/v1/config", "wrong", 401),
            ("/inferd/v1/config", "root", 200),
        ):
            async with made.api.get(made.addresses.admin + path, headers={"Authorization": f"Bearer {key}"}) as got:
                assert got.status == expected, path
    async with running(tmp_path, settings={"admin_port": 0}) as made:
        config = f"{made.addresses.admin}/inferd/v1/config"
        async with made.api.get(config) as got:
            assert got.status == 403


async def test_metrics_count_what_was_served(tmp_path: Path) -> None:
    async with running(tmp_path, saying("ok")) as made:
        await made.post("/v1/chat/completions", CHAT)
        await made.post("/v1/chat/completions", {**CHAT, "temperature": 9})
        wanted = 'inferd_requests_finished_total{engine="0",model="tiny",reason="rejected"} 1.0'
        async with asyncio.timeout(60):
            while wanted not in (await made.get("/metrics"))[1].decode():
                await asyncio.sleep(0.02)


async def test_a_second_daemon_on_one_socket_and_a_taken_port_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path):
        with pytest.raises(AlreadyRunning, match="another inferd"):
            async with running(tmp_path):
                pass
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AddressInUse, match="in use"):
            async with running(tmp_path, settings={"port": taken.getsockname()[1]}):
                pass
    async with running(tmp_path) as made:
        assert (await made.get("/health/live"))[0] == 200, "nothing was left behind"


async def test_an_api_without_a_key_serves_loopback_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no API key"):
        async with running(tmp_path, settings={"host": "0.0.0.0"}):
            pass
    async with running(tmp_path, settings={"host": "0.0.0.0", "api_key": "k"}) as made:
        assert (await made.post("/v1/chat/completions", CHAT))[0] == 401


async def test_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        monkeypatch.setenv("WATCHDOG_USEC", "20000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
        said: list[str] = []
        async with running(tmp_path), asyncio.timeout(60):
            while "WATCHDOG=1" not in said or "READY=1" not in said:
                said.append((await asyncio.get_running_loop().sock_recv(manager, 256)).decode())
        try:
            while True:
                said.append(manager.recv(256).decode())
        except BlockingIOError:
            pass
    assert said.index("READY=1") < said.index("STOPPING=1")


async def test_told_to_stop_while_the_engine_loads_it_stops(tmp_path: Path) -> None:
    async with running(tmp_path, hold=True) as made:
        made.daemon.stop()
        assert await asyncio.wait_for(made.done, 60) == 0


async def test_an_engine_that_cannot_start_ends_the_daemon_with_its_error(tmp_path: Path) -> None:
    class Hopeless(ScriptedEngine):
        async def wait_ready(self) -> Any:
            raise ConfigError("no such thing")

    for name in ("run", "state"):
        (tmp_path / name).mkdir(mode=0o700)
    daemon = Daemon(
        load({"port": 0}, environ={}),
        Model(name="tiny", text=ByteText(), eos_token_ids=()),
        lambda _: Hopeless(lambda _: Script()),
        runtime_dir=tmp_path / "run",
        state_dir=tmp_path / "state",
        version="0",
    )
    with pytest.raises(ConfigError, match="no such thing"):
        await asyncio.wait_for(daemon.run(), 60)


async def test_500_probes_are_answered_while_the_api_is_saturated_and_no_message_reaches_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 26. The loop of this test is the API's: it does nothing but wait for the thread that probes."""
    messages: list[str] = []
    statuses: list[int] = []
    took_s: list[float] = []
    for name in ("submit", "set_limits", "ask", "act"):

        def counted(*_: Any, name: str = name, **__: Any) -> Any:
            messages.append(name)
            raise AssertionError(f"{name}: a message to the engine")

        monkeypatch.setattr(ScriptedEngine, name, counted)

    def probe(socket_path: Path, admin: str) -> None:
        clients = [Client(Endpoint(socket=socket_path), timeout_s=60), Client(Endpoint(url=admin), timeout_s=60)]
        for number in range(500):
            path = ("/health/live", "/health/ready", "/health/startup", "/health")[number % 4]
            begun = time.monotonic()
            statuses.append(200 if clients[number % 2].get(path) else 0)  # another status raises
            took_s.append(time.monotonic() - begun)

    async with running(tmp_path, settings={"admin_port": 0}) as made:
        assert made.addresses.admin is not None
        before = made.engine.view()
        thread = threading.Thread(target=probe, args=(made.addresses.control, made.addresses.admin))
        thread.start()
        thread.join(120)
        assert not thread.is_alive()
        assert statuses == [200] * 500
        assert sorted(took_s)[int(0.99 * 500)] < 5
        assert messages == []
        assert made.engine.view() == before
