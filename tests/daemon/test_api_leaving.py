"""Clients that leave, at every stage, and clients that do not read: cancelled at once, accounted for."""

import asyncio
import json
import random
import socket
from typing import Any

import pytest

from tests.fakes.api import Api, chat_body, serving
from tests.fakes.port import Script, ScriptedPort, saying


async def until(true: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.002)


def idle(api: Api) -> bool:
    """Nothing is kept of any request."""
    return not (api.kitchen.live or api.kitchen.settling or api.port.live or any_waiting(api))


def any_waiting(api: Api) -> bool:
    queue = api.kitchen.queue
    return bool(queue.open_requests or queue.waiting_choices or queue.running_choices or queue.waiting_tokens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_while_the_request_waits_or_runs_cancels_it(stream: bool, n: int) -> None:
    """Case 30."""
    async with ScriptedPort(saying("abc" * 30, hang_after=5), rows=3) as port, serving(port) as api:
        running = asyncio.create_task(api.chat(stream=stream, n=n, max_tokens=200))
        await until(lambda: len(api.first_tokens) == n)
        port.pause()
        waiting = asyncio.create_task(api.chat(stream=stream, n=n))
        await until(lambda: len(port.seen.requests) == 2 * n)
        for task in (running, waiting):
            task.cancel()
        await until(lambda: len(port.seen.cancelled) == 2 * n)
        assert {reason for _, reason in port.seen.cancelled} == {"abort"}
        port.resume()
        await until(lambda: len(api.records) == 2 * n)
        await until(lambda: idle(api))
    assert {(r.reason, r.error, r.status) for r in api.records} == {("abort", "client_disconnected", 499)}
    assert sum(r.output_tokens > 0 for r in api.records) == n
    for record in api.records:
        assert sum(record.stages.values()) == record.at_ns - record.arrival_ns


async def test_leaving_in_the_middle_of_the_body_leaves_a_record_and_no_request() -> None:
    async with ScriptedPort() as port, serving(port) as api:
        _, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
        writer.write(head(1000) + b"{")
        await until(lambda: api.kitchen.live)
        writer.close()
        await until(lambda: api.records)
        await until(lambda: idle(api))
    assert not port.seen.requests
    assert api.records[0].reason == "abort"
    assert set(api.records[0].stages) == {"admission"}


async def test_half_a_proxy_that_closes_its_side_is_a_leaving_client() -> None:
    async with ScriptedPort(saying("abc", hang_after=1)) as port, serving(port) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
        body = json.dumps(chat_body()).encode()
        writer.write(head(len(body)) + body)
        await until(lambda: port.seen.requests)
        writer.write_eof()
        await until(lambda: api.records)
        writer.close()
        assert api.records[0].reason == "abort"
        del reader


async def test_a_slow_reader_stalls_its_own_stream_only() -> None:
    """It is granted no more than its credit; others finish; when it reads on, it gets everything."""
    long, credit = "x" * 100_000, 2000
    script = saying(long, burst=256)
    async with (
        ScriptedPort(script, credit=credit, context=10**6) as port,
        serving(port, send_buffer_bytes=4096) as api,
    ):
        reader, writer = await asyncio.open_connection(sock=await narrow(api), limit=1024)
        body = json.dumps(chat_body(stream=True, max_tokens=len(long))).encode()
        writer.write(head(len(body)) + body)
        given = -1
        async with asyncio.timeout(60):
            while given != (given := sum(row.given for row in port._rows.values())) or not given:
                await asyncio.sleep(0.1)
        assert given < len(long), "it stands still"
        assert (await api.chat(max_tokens=5))[0] == 200, "others do not"
        async with asyncio.timeout(60):
            text = await read_to_done(reader)
        writer.close()
        await api.settled(2)
    assert text.count(b"x") >= len(long)
    assert [r.output_tokens for r in api.records] == [5, len(long)]


async def test_a_client_that_reads_no_more_gives_its_row_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of them would take all rows, with an engine that has nothing to do."""
    monkeypatch.setattr("daemon.api.sending.SEND_S", 0.3)
    long = "x" * 1_000_000
    script = saying(long, burst=256)
    async with (
        ScriptedPort(script, credit=2000, context=10**7, rows=1) as port,
        serving(port, send_buffer_bytes=4096) as api,
    ):
        _, writer = await asyncio.open_connection(sock=await narrow(api), limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        body = json.dumps(chat_body(stream=True, max_tokens=len(long))).encode()
        writer.write(head(len(body)) + body)
        await until(lambda: api.records)
        await until(lambda: idle(api))
        writer.close()
    assert (api.records[0].reason, api.records[0].error) == ("abort", "client_disconnected")
    assert api.records[0].output_tokens < len(long)


async def narrow(api: Api) -> socket.socket:
    """A connection whose receive buffer is as small as the kernel allows."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", int(api.url.rpartition(":")[2])))
    return made


def head(length: int) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % length
    )


async def read_to_done(reader: asyncio.StreamReader) -> bytes:
    data = bytearray()
    while b"[DONE]" not in data[-64:]:
        data += await reader.read(65536)
    return bytes(data)


async def test_clients_that_come_and_go_at_random_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Case 7's half in the daemon: maps, queue and engine are empty at the end, and every choice has one record."""
    rng = random.Random(7)
    made = 0

    async def one(api: Api) -> None:
        nonlocal made
        n = rng.choice((1, 1, 2))
        made += n
        send = api.stream if rng.random() < 0.5 else api.chat
        request: Any = send(n=n, max_tokens=rng.randint(1, 40))
        try:
            async with asyncio.timeout(rng.random() * 0.1):
                await request
        except TimeoutError:
            pass

    async def many(api: Api) -> None:
        for _ in range(8):
            await one(api)

    async with ScriptedPort(saying("word " * 20), rows=4, step_s=0.001) as port, serving(port) as api:
        await asyncio.gather(*(many(api) for _ in range(24)))
        await until(lambda: idle(api), 10)
        assert len({r.request_id for r in api.records}) == len(api.records)
        assert all(sum(r.stages.values()) == r.at_ns - r.arrival_ns for r in api.records)
        assert {r.reason for r in api.records} <= {"stop", "length", "abort"}
        with_tokens = sum(1 for r in api.records if r.output_tokens)
        assert len(api.first_tokens) <= with_tokens
        assert (await api.chat())[0] == 200
    assert len(api.records) <= made + 1
    assert not [r for r in caplog.records if r.levelname == "ERROR"], "leaving is nobody's fault"


async def test_a_choice_that_fails_takes_its_siblings_along_but_not_their_records() -> None:
    def script(request: Any) -> Script:
        return Script(tokens=(97, 98), error_code="out_of_memory") if request.index else Script(hang_after=1)

    async with ScriptedPort(script) as port, serving(port) as api:
        for stream in (False, True):
            async with api.client.post(
                api.url + "/v1/chat/completions", json=chat_body(n=2, stream=stream)
            ) as response:
                text = await response.text()
            assert "out_of_memory" in text
            assert "[DONE]" not in text
        await api.settled(4)
        assert len(port.seen.cancelled) == 2
    assert [r.reason for r in api.records] == ["error"] * 4
