"""A headless chromium for tests, driven over its debugger's socket.

Owns the process and the order of commands and answers. It must not know pages. Enter at `chromium`, then `Talk`.
"""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.served import wait_for

PATIENCE_S = 60.0


def chromium(profile: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A browser, to be ended by the caller, and the address of its debugger."""
    words = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--remote-debugging-port=0",
    ]
    process = subprocess.Popen(
        [*words, f"--user-data-dir={profile}", "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    file = profile / "DevToolsActivePort"
    wait_for(lambda: file.exists() and "\n" in file.read_text(), PATIENCE_S, "chromium's debugger")
    return process, f"http://127.0.0.1:{file.read_text().splitlines()[0]}"


class Talk:
    """One page. `events` are all that came so far."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.events: list[dict[str, Any]] = []

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """One command, to its answer."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._heard()
            if message.get("id") == self._number:
                return dict(message["result"])

    async def until(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            await self._heard()

    async def value(self, expression: str) -> Any:
        """What JavaScript makes of it."""
        answer = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"]["value"]

    async def _heard(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads((await self._socket.receive()).data)
        self.events.append(message)
        return message


async def page_socket(session: aiohttp.ClientSession, debugger: str) -> str:
    """Where the browser's first page is talked to, once there is one: the debugger answers before."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with session.get(f"{debugger}/json/list") as response:
                for page in await response.json(content_type=None):
                    if page["type"] == "page":
                        return str(page["webSocketDebuggerUrl"])
            await asyncio.sleep(0.05)


@asynccontextmanager
async def talking(debugger: str) -> AsyncIterator[Talk]:
    """The browser's one page."""
    async with aiohttp.ClientSession() as session:
        url = await page_socket(session, debugger)
        async with session.ws_connect(url, max_msg_size=0) as socket:
            yield Talk(socket)
