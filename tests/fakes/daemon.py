"""A whole daemon around a ScriptedPort: `async with running(tmp_path) as made` serves on free ports until left."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from daemon.house import Model
from daemon.port import EngineView
from daemon.serving import Addresses, Daemon
from daemon.settings import load
from engine.budget import Limits, Resolved
from engine.request import Request
from tests.fakes.port import Script, ScriptedPort
from tests.fakes.text import EOS, ByteText


class ScriptedEngine(ScriptedPort):
    """A ScriptedPort with the life of an engine. `hold` keeps it loading until `load` is called."""

    def __init__(self, script: Callable[[Request], Script], *, hold: bool = False, **how: Any) -> None:
        super().__init__(script, **how)
        self.loaded = asyncio.Event()
        if not hold:
            self.loaded.set()
        self.state("starting", "the engine is loading")

    async def start(self) -> None:
        await self.__aenter__()

    async def wait_ready(self) -> EngineView:
        await self.loaded.wait()
        self.state("ready")
        return self.view()

    def on_limits(self, choose: Callable[[Resolved, Limits], Limits]) -> None:
        view = self.view()
        assert view.resolved is not None and view.limits is not None
        choose(view.resolved, view.limits)

    def sizes(self) -> dict[str, int]:
        return {"session_streams": self.live}


@dataclass
class Made:
    daemon: Daemon
    engine: ScriptedEngine
    addresses: Addresses
    api: aiohttp.ClientSession
    control: aiohttp.ClientSession
    done: "asyncio.Task[int]"

    async def get(self, path: str, *, control: bool = False) -> tuple[int, Any]:
        session, base = (self.control, "http://inferd") if control else (self.api, self.addresses.api)
        async with session.get(base + path) as response:
            body = await response.read()
            return response.status, await response.json() if response.content_type == "application/json" else body

    async def post(self, path: str, body: Any = None, *, control: bool = False) -> tuple[int, Any]:
        session, base = (self.control, "http://inferd") if control else (self.api, self.addresses.api)
        async with session.post(base + path, json=body if body is not None else {}) as response:
            return response.status, await response.json()


@asynccontextmanager
async def running(
    directory: Path,
    script: Callable[[Request], Script] = lambda _: Script(),
    *,
    settings: dict[str, Any] | None = None,
    hold: bool = False,
    **how: Any,
) -> AsyncIterator[Made]:
    for name in ("run", "state"):
        (directory / name).mkdir(exist_ok=True, mode=0o700)
    engine = ScriptedEngine(script, hold=hold, **how)
    listening: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
    ready = asyncio.Event()
    daemon = Daemon(
        load({"port": 0, "grace": 5, **(settings or {})}, environ={}, config=None),
        Model(name="tiny", text=ByteText(), eos_token_ids=(EOS,)),
        lambda publish: engine,
        runtime_dir=directory / "run",
        state_dir=directory / "state",
        version="9.9",
        on_listening=listening.set_result,
        on_ready=lambda _: ready.set(),
    )
    done = asyncio.create_task(daemon.run())
    await asyncio.wait((done, listening), return_when=asyncio.FIRST_COMPLETED, timeout=60)
    if done.done():
        done.result()
    addresses = listening.result()
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as api,
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(addresses.control))) as control,
        ):
            if not hold:
                await asyncio.wait_for(ready.wait(), 60)
            yield Made(daemon, engine, addresses, api, control, done)
    finally:
        daemon.stop()
        async with asyncio.timeout(60):
            await done
