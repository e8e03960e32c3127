"""`inferd top` for real: in a terminal (tmux) against a daemon under load, in trouble, and killed; in a browser; and as
plain text while the daemon drowns."""

import asyncio
import base64
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from daemon import cli
from tests.browser import chromium, page_socket
from tests.fakes.daemon import running
from tests.fakes.tiny_served import Load, tiny_served
from tests.served import INFERD, ROOT, Served, free_port, wait_for

PATIENCE_S = 90


class Terminal:
    """A tmux session of its own server, 80×24, in which a command runs."""

    def __init__(self, words: list[str], size: tuple[int, int] = (80, 24)) -> None:
        self._server = f"inferd-{uuid.uuid4().hex[:12]}"
        width, height = size
        self._tmux(
            *("new-session", "-d", "-x", str(width), "-y", str(height), "-s", "top"),
            f"cd {ROOT} && TERM=xterm-256color {shlex.join(words)}; echo ended with $?; sleep 300",
        )

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-u", "-L", self._server, "-f", "/dev/null", *words], capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def keys(self, *names: str) -> None:
        self._tmux("send-keys", "-t", "top", *names)

    def text(self) -> str:
        return self._tmux("capture-pane", "-p", "-t", "top")

    def shows(self, *said: str) -> str:
        """Wait until all of it is on the screen."""
        try:
            wait_for(lambda: all(part in self.text() for part in said), PATIENCE_S, str(said))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None
        return self.text()

    def close(self) -> None:
        subprocess.run(["tmux", "-L", self._server, "kill-server"], capture_output=True, timeout=30)


def top(served: Served, *flags: str) -> list[str]:
    return [*INFERD, "top", "--socket", str(served.runtime / "control.sock"), *flags]


def tuner(served: Served) -> dict[str, Any]:
    """What the live tuner says of itself."""
    status, body = served.control("/inferd/v1/tuner")
    assert status == 200, body
    answer: dict[str, Any] = json.loads(body)
    return answer


def tuner_is(served: Served, frozen: bool) -> bool:
    return (tuner(served)["state"] == "frozen") == frozen


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tiny_served(tmp_path_factory.mktemp("top"), "--max-num-seqs", "8") as daemon:
        yield daemon


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium: see .ci/packages.txt")
async def test_the_browser_form_opens_and_answers_keys(served: Served, tmp_path: Path) -> None:
    """Chromium opens the printed address; what the page's socket brings is the app, and a key turns its screen."""
    port = free_port()
    server = await asyncio.to_thread(_browser_form, served, port)
    browser: subprocess.Popen[bytes] | None = None
    try:
        assert server.stdout is not None
        address = (await asyncio.to_thread(server.stdout.readline)).split()[3]
        async with aiohttp.ClientSession() as session:
            async with session.get(address.split("?")[0]) as refused:
                assert refused.status == 403, "without the token"
            elsewhere = {"Origin": "http://evil.example"}
            async with session.get(address, headers=elsewhere) as refused:
                assert refused.status == 403, "for a page of another origin"
            browser, debugger = await asyncio.to_thread(chromium, tmp_path)
            await asyncio.wait_for(_visit(session, debugger, address), PATIENCE_S)
    finally:
        for process in (browser, server):
            if process is not None:
                process.terminate()
                process.wait(60)


def _browser_form(served: Served, port: int) -> subprocess.Popen[str]:
    return subprocess.Popen(top(served, "--serve", str(port)), stdout=subprocess.PIPE, text=True, cwd=ROOT)


async def _visit(session: aiohttp.ClientSession, debugger: str, address: str) -> None:
    url = await page_socket(session, debugger)
    async with session.ws_connect(url, max_msg_size=0) as talk:
        seen: list[str] = []  # what the page's own socket brought

        async def heard() -> dict[str, Any]:
            event: dict[str, Any] = json.loads((await talk.receive()).data)
            if event.get("method") == "Network.webSocketFrameReceived":
                frame = event["params"]["response"]
                data = base64.b64decode(frame["payloadData"]) if frame["opcode"] == 2 else b""
                seen.append(data.decode(errors="replace"))
            return event

        async def ask(number: int, method: str, **params: Any) -> None:
            """One command, to its answer: the browser may answer the next one earlier."""
            await talk.send_json({"id": number, "method": method, "params": params})
            while (await heard()).get("id") != number:
                pass

        async def until(said: str) -> None:
            while said not in "".join(seen):
                await heard()

        await ask(1, "Network.enable")
        await ask(2, "Page.enable")
        await ask(3, "Page.navigate", url=address)
        await until("inter-token")
        await ask(4, "Runtime.evaluate", expression="document.querySelector('.xterm-helper-textarea').focus()")
        key = {"key": "3", "code": "Digit3", "windowsVirtualKeyCode": 51}
        await ask(5, "Input.dispatchKeyEvent", type="keyDown", text="3", **key)
        await ask(6, "Input.dispatchKeyEvent", type="keyUp", **key)
        await until("Block map")


@pytest.mark.skipif(not shutil.which("tmux"), reason="no tmux: see .ci/packages.txt")
@pytest.mark.timeout(300)
def test_a_terminal_through_load_trouble_and_death(served: Served) -> None:
    """Every screen under load; the tuner's limit set and a request aborted from here; the engine killed; the daemon
    killed and started again; and a clean end."""
    terminal = Terminal(top(served))
    try:
        terminal.shows("inferd ●", "1 Overview", "TTFT")
        with Load(served, clients=4, prompt="Tell me of rivers ", tokens=150):
            terminal.shows("run 4")
            for key, said in (("2", "In use over time"), ("3", "■ active"), ("4", "Lanes by phase"), ("6", "Limits")):
                terminal.keys(key)
                terminal.shows(said)
            for key, question, frozen in (("f", "Freeze", True), ("l", "Release", False), ("f", "Freeze", True)):
                terminal.keys(key)
                terminal.shows(f"{question} the tuner?", "POST /inferd/v1/tuner")
                terminal.keys("y")
                wait_for(partial(tuner_is, served, frozen), PATIENCE_S, question)
            terminal.shows("done; the tuner is frozen")
            terminal.keys("s")
            terminal.shows("Set a limit")
            terminal.keys("max_num_seqs 2", "Enter")
            terminal.shows("Set max_num_seqs?")
            terminal.keys("y")
            terminal.shows("done; the tuner is frozen; it leaves alone: max_num_seqs")
            assert served.snapshot("limits")["limits"]["max_num_seqs"] == 2
            assert (tuner(served)["state"], tuner(served)["pinned"]) == ("frozen", ["max_num_seqs"])
            terminal.keys("1")
            terminal.shows("for capacity")
            terminal.keys("5")
            terminal.shows("running", "cmpl-")
            terminal.keys("a")
            terminal.shows("Abort this request?", "POST /inferd/v1/abort/cmpl-")
            terminal.keys("y")
            terminal.shows("abort")
            os.kill(served.engine_pid(), signal.SIGKILL)
            terminal.keys("7")
            terminal.shows("incident", "killed")
        wait_for(served.ready, PATIENCE_S, "the engine is back")
        terminal.keys("1")
        terminal.shows("inferd ●", "restarts 1")
        assert served.process is not None
        served.process.kill()
        served.process.wait(60)
        terminal.shows("no answer for", "retrying", "TTFT")
        served.start()
        terminal.shows("inferd ●")
        terminal.keys("?")
        terminal.shows("keys and signs")
        terminal.keys("q")  # closes the help
        terminal.shows("inferd ●", "TTFT")
        terminal.keys("q")
        terminal.shows("ended with 0")
    finally:
        terminal.close()


async def test_top_once_answers_within_two_seconds_while_the_api_loop_is_blocked(tmp_path: Path) -> None:
    """The loop of this test is the daemon's API loop; it is blocked by waiting for the thread that asks."""
    found: dict[str, Any] = {}

    def look(path: Path) -> None:
        for flag in ("--once", "--json"):
            for _ in range(5):  # a machine that does other things too may be slow once
                begin = time.monotonic()
                done = CliRunner().invoke(cli.inferd, ["top", "--socket", str(path), flag])
                found[flag] = (done.exit_code, done.output, time.monotonic() - begin)
                if found[flag][2] < 2:
                    break

    async with running(tmp_path) as made:
        thread = threading.Thread(target=look, args=(made.addresses.control,))
        thread.start()
        thread.join(100)  # blocks this loop on purpose
        assert not thread.is_alive()
    assert "TTFT" in found["--once"][1] and json.loads(found["--json"][1])["state"]["daemon"] == "ready"
    assert all(code == 0 and seconds < 2 for code, _, seconds in found.values())


def test_top_once_says_where_no_daemon_is(tmp_path: Path) -> None:
    for flags in (["--socket", str(tmp_path / "none.sock")], ["--url", "http://127.0.0.1:1"]):
        done = subprocess.run([*INFERD, "top", "--once", *flags], capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert done.returncode == 8
        assert done.stderr.startswith("inferd: ") and "is the daemon running?" in done.stderr
        assert done.stderr.count("\n") == 1


def test_without_textual_one_line_says_what_to_install() -> None:
    """An interpreter that cannot find textual, as a base install."""
    code = (
        "import sys, importlib.util as u; found = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'textual' else found(name, *a);"
        "from daemon.cli import run; sys.exit(run(['top']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2
    assert "pip install 'inferd[tui]'" in done.stderr and done.stderr.count("\n") == 1


def test_flags_that_contradict_each_other_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("")
    for words in (["--replay", str(tmp_path / "x.jsonl"), "--url", "http://x"], ["--serve", "9", "--once"]):
        done = CliRunner().invoke(cli.inferd, ["top", *words])
        assert done.exit_code == 2 and "cannot be combined" in done.output
