"""A whole daemon around real engine processes without a model: what clients see when an engine is killed, over HTTP."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp

from daemon.house import Model
from daemon.port import EngineView
from daemon.serving import Addresses, Daemon
from daemon.session import EngineSession
from daemon.settings import load
from engine.config import EngineConfig
from tests.fakes.engine_main import argv
from tests.fakes.text import EOS, ByteText

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def test_kill_9_of_the_engine_under_eight_streams(tmp_path: Path) -> None:
    """Every client gets a terminal event, live and metrics answer throughout, and it serves again by itself."""
    for name in ("run", "state"):
        (tmp_path / name).mkdir(mode=0o700)
    loop = asyncio.get_running_loop()
    listening: asyncio.Future[Addresses] = loop.create_future()
    ready: asyncio.Future[EngineView] = loop.create_future()
    sessions: list[EngineSession] = []

    def make_engine(publish: Any) -> EngineSession:
        config = EngineConfig(model_dir="none")
        sessions.append(EngineSession(config, tmp_path / "run", publish, argv=argv(step_s=0.02), backoff_s=(0.05, 0.1)))
        return sessions[0]

    daemon = Daemon(
        load({"port": 0, "grace": 1}, environ={}),
        Model(name="tiny", text=ByteText(), eos_token_ids=(EOS,)),
        make_engine,
        runtime_dir=tmp_path / "run",
        state_dir=tmp_path / "state",
        version="0",
        on_listening=listening.set_result,
        on_ready=ready.set_result,
    )
    done = asyncio.create_task(daemon.run())
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as client:
            url = (await listening).api
            pid = (await ready).pid
            assert pid is not None
            began = asyncio.Semaphore(0)

            async def one() -> str:
                body = {**CHAT, "stream": True, "max_tokens": 2000, "ignore_eos": True}
                async with client.post(f"{url}/v1/chat/completions", json=body) as stream:
                    assert stream.status == 200
                    first = await stream.content.readline()
                    began.release()
                    return (first + await stream.read()).decode()

            streams = [asyncio.create_task(one()) for _ in range(8)]
            for _ in streams:
                await began.acquire()
            os.kill(pid, signal.SIGKILL)
            while not all(s.done() for s in streams) or sessions[0].view().pid in (None, pid):
                for path in ("/health/live", "/metrics"):
                    async with client.get(url + path) as answer:
                        assert answer.status == 200
                await asyncio.sleep(0.02)
            for stream in streams:
                last = json.loads(stream.result().strip().splitlines()[-1].removeprefix("data: "))
                assert last["error"]["code"] == "engine_died"
            async with client.post(f"{url}/v1/chat/completions", json={**CHAT, "max_tokens": 3}) as answer:
                assert answer.status == 200
                assert (await answer.json())["usage"]["completion_tokens"] <= 3
    finally:
        daemon.stop()
        assert await asyncio.wait_for(done, 60) == 0
