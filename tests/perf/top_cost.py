"""What `inferd top` costs: itself, at one frame a second, idle and with much to show; how quickly it
redraws and answers a key; and what being watched costs the daemon."""

import asyncio
import os
import pty
import random
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from threading import Thread

import psutil

from telemetry.events import RequestView
from telemetry.parts import KvView, RequestsView
from telemetry.snapshot import Snapshot
from tests.fakes.tiny_served import Load, tiny_served
from tests.perf.harness import Findings
from tests.served import INFERD, Served
from tests.tui.driving import StillFeed
from tui.app import Top, pages
from tui.view import Frame

TITLE = "inferd top: CPU at 1 Hz, redraw, key latency, cost to the daemon"
PROMISE = (
    "≤ 3 % of a core idle, ≤ 10 % with 2,000 requests and 20,000 blocks; redraw p95 ≤ 50 ms; key ≤ 100 ms; "
    "the daemon pays ≤ 1 % of its CPU time"
)
_SEED = 5
_REQUESTS, _BLOCKS = 2_000, 20_000
_SIZE = (160, 50)


def _frames(count: int) -> list[Frame]:
    """Snapshots with everything changing in each: the worst that one second can bring."""
    chance = random.Random(_SEED)
    frames = []
    for number in range(count):
        live = [
            RequestView(
                request_id=f"chatcmpl-{n:08}-0",
                state="running" if n < 256 else "waiting",
                reason="" if n < 256 else "kv",
                received_ns=number * 10**9,
                prompt_tokens=chance.randrange(4000),
                output_tokens=chance.randrange(4000),
                max_tokens=4000,
                computed_tokens=number,
                cached_tokens=0,
                blocks=chance.randrange(200),
                preemptions=0,
            )
            for n in range(_REQUESTS)
        ]
        states = chance.choices(range(4), (4, 2, 3, 1), k=_BLOCKS)
        kv = KvView(active=8000, cached=4000, free=8000, block_size=16, block_map=bytes(states))
        shot = Snapshot(
            at_ns=number * 10**9, unix_seconds=float(number), model="m", requests=RequestsView(live=live), kv=kv
        )
        frames.append(Frame(at_ns=number * 10**9, snapshot=shot))
    return frames


async def _redraws(frames: list[Frame]) -> dict[str, float]:
    """Milliseconds from a frame to the painted screen, over all screens; and from a key to the next screen."""
    app = Top(StillFeed())
    redraws: list[float] = []
    keys: list[float] = []
    async with app.run_test(size=_SIZE) as pilot:
        for page in pages():
            begin = time.perf_counter()
            await pilot.press(page.KEY)
            await pilot.pause(0)
            keys.append((time.perf_counter() - begin) * 1e3)
            for frame in frames:
                begin = time.perf_counter()
                app.take(frame)
                app.screen._compositor.render_update(full=False)
                redraws.append((time.perf_counter() - begin) * 1e3)
                await pilot.pause(0)
    redraws.sort()
    return {"redraw_p95_ms": round(redraws[int(len(redraws) * 0.95)], 1), "key_most_ms": round(max(keys), 1)}


def _cpu_share(act: Callable[[], None], pid: int, seconds: float) -> float:
    """Percent of a core that the process used while `act` ran for about `seconds`."""
    process = psutil.Process(pid)
    before, begin = sum(process.cpu_times()[:2]), time.monotonic()
    act()
    time.sleep(max(0.0, seconds - (time.monotonic() - begin)))
    return 100 * (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begin)


class _Watching:
    """`inferd top` on a terminal of its own, of which everything is read."""

    def __init__(self, served: Served) -> None:
        ours, theirs = pty.openpty()
        ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", _SIZE[1], _SIZE[0], 0, 0))
        words = [*INFERD, "top", "--socket", str(served.runtime / "control.sock")]
        environ = {**os.environ, "TERM": "xterm-256color"}
        self._process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
        self.pid = self._process.pid
        self._terminal = ours
        Thread(target=self._read, daemon=True).start()
        os.close(theirs)
        time.sleep(5)  # started, and past its first full picture

    def _read(self) -> None:
        try:
            while os.read(self._terminal, 65536):
                pass
        except OSError:
            return  # the other end is closed

    def press(self, key: str) -> None:
        os.write(self._terminal, key.encode())

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(10)
        os.close(self._terminal)


def _watched(seconds: float) -> dict[str, float]:
    """Against a real daemon: top's own share when it idles and works, and the daemon's with and without."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as made, tiny_served(Path(made)) as served:
        watching = _Watching(served)
        found["top_idle_percent"] = _cpu_share(lambda: None, watching.pid, seconds)
        watching.close()
        with Load(served, clients=8, prompt="A story ", tokens=200):
            time.sleep(3)
            alone = _cpu_share(lambda: None, served.pid, seconds)
            watching = _Watching(served)
            found["top_loaded_percent"] = _cpu_share(lambda: None, watching.pid, seconds)
            beside = _cpu_share(lambda: None, served.pid, seconds)
            watching.close()
        found["daemon_alone_percent"], found["daemon_watched_percent"] = alone, beside
    return {name: round(value, 2) for name, value in found.items()}


def _filled(frames: list[Frame]) -> float:
    """Percent of a core for one frame a second with everything in it, on the two screens that show it."""

    async def play() -> float:
        app = Top(StillFeed())
        async with app.run_test(size=_SIZE) as pilot:
            spent = 0.0
            for key in ("3", "5"):
                await pilot.press(key)
                await pilot.pause()
                begin = time.process_time()
                for frame in frames:
                    app.take(frame)
                    await pilot.pause()
                spent = max(spent, (time.process_time() - begin) / len(frames))
        return 100 * spent

    return round(asyncio.run(play()), 2)


def run(quick: bool) -> Findings:
    """One round: the figures are shares of time, not of a best case."""
    frames = _frames(3 if quick else 30)
    figures = {
        **asyncio.run(_redraws(frames)),
        "top_filled_percent": _filled(frames),
        **_watched(2.0 if quick else 30.0),
    }
    cost = figures["daemon_watched_percent"] / max(0.01, figures["daemon_alone_percent"]) - 1
    met = (
        figures["top_idle_percent"] <= 3
        and figures["top_filled_percent"] <= 10
        and figures["redraw_p95_ms"] <= 50
        and figures["key_most_ms"] <= 100
        and cost <= 0.01
    )
    return Findings(
        runs=[dict(figures)],
        summary={**figures, "daemon_cost_percent_of_its_own": round(100 * cost, 2)},
        met=met,
        seeds=[_SEED],
        notes=[f"top_filled: decoding is not in it; {_REQUESTS} requests, {_BLOCKS} blocks, {_SIZE[0]}×{_SIZE[1]}"],
    )
