"""One load test from flags to report: connects, drives, shows progress, answers Ctrl-C.

Owns the progress line on stderr and the signal; the figures are daemon/load/report.py's. Enter at `measured`.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from autotune.workload import UNBOUNDED, Replay, Traffic, synthetic
from daemon.lab.recorded import recording
from daemon.lab.shelf import keep_load
from daemon.lab.watch import Watch, beside
from daemon.load.client import TargetError, connect
from daemon.load.drive import Drive
from daemon.load.report import Run, summarize
from daemon.load.scenarios import Lengths, scenario
from daemon.load.workload import Workload

_PROGRESS_S = 1.0
_TEMPLATE_TOKENS = 64  # what a chat template adds to a prompt, with room to spare


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The flags of one `inferd bench load`; `rate` given means an open loop."""

    url: str
    model: str
    scenario: str
    concurrency: int
    requests: int
    rate: float | None
    arrival: str
    duration: float
    journal: str
    trace: str
    prompt_tokens: Lengths | None
    output_tokens: Lengths | None
    seed: int
    timeout: float
    api_key_env: str
    ignore_eos: bool = False
    report: str = ""  # where an HTML page goes, and its JSON beside it
    socket: str = ""  # of the inferd behind `url`, whose memory and limits the report shows

    @property
    def load(self) -> str:
        """How requests are sent, in words."""
        if self.journal or self.trace:
            return f"the requests of {self.journal or self.trace}"
        if self.rate is not None:
            how = "" if self.arrival == "poisson" else f", {self.arrival}"
            return f"{self.rate:g} requests/s{how} for {self.duration:g} s"
        return f"{self.requests} requests, {self.concurrency} at a time"


def measured(asked: Asked) -> dict[str, Any]:
    """The report of one run. Raises click.ClickException if the server cannot be measured."""
    return asyncio.run(_measure(asked))


async def _measure(asked: Asked) -> dict[str, Any]:
    mix = scenario(asked.scenario, asked.prompt_tokens, asked.output_tokens)
    recorded = recording(asked.journal, asked.trace) if asked.journal or asked.trace else None
    # As many connections as requests under way, so that the pool's queue never hides in the server's figures.
    connections = 0 if asked.rate is not None or recorded else asked.concurrency
    async with connect(asked.url, asked.model, os.environ.get(asked.api_key_env, ""), connections) as client:
        client.timeout_s, client.ignore_eos = asked.timeout, asked.ignore_eos
        try:
            sizer = await client.prepare()
        except TargetError as reason:
            raise click.ClickException(str(reason)) from None
        drive = Drive(Workload(mix, asked.seed, sizer), client.ask)
        watch = await asyncio.to_thread(beside, asked.url, asked.socket) if asked.report else Watch(None)
        async with watch:
            with _interruptible(drive), _progress(drive, asked.load):
                await drive.send(*_traffic(asked, drive.workload, recorded, client.longest))
        about = {
            "url": client.url,
            "model": client.model,
            "scenario": "recorded" if recorded else asked.scenario,
            "load": asked.load,
            "seed": asked.seed,
            "prompt_sizes": sizer.source,
            "tokens_per_word": round(sizer.tokens_per_word, 4),
            "started_at": time.strftime(
                "%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - (time.perf_counter() - drive.began_s))
            ),
        }
        run = Run(
            about=about,
            samples=drive.samples,
            unfinished=drive.unfinished,
            began_s=drive.began_s,
            ended_s=drive.ended_s,
            lag_s=drive.lag_s,
            interrupted=drive.stopped,
        )
        report = summarize(run)
        if asked.report:
            keep_load(asked.report, report, run, watch)
        return report


def _traffic(asked: Asked, workload: Workload, recorded: Replay | None, longest: int) -> tuple[Traffic, int | None]:
    """What to send, and how many at most."""
    if recorded:
        return recorded, None
    most = longest - _TEMPLATE_TOKENS if longest else UNBOUNDED
    if asked.rate is not None:
        return synthetic(
            workload.mix, seed=asked.seed, arrival=asked.arrival, rate=asked.rate, until_s=asked.duration, longest=most
        ), None
    users = min(asked.concurrency, asked.requests)
    return synthetic(workload.mix, seed=asked.seed, users=users, longest=most), asked.requests


@contextmanager
def _interruptible(drive: Drive) -> Iterator[None]:
    """The first Ctrl-C ends the run with its report; a second one ends the process as usual."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        drive.stop()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def _progress(drive: Drive, what: str) -> Iterator[None]:
    """One line a second on stderr: rewritten on a terminal, every tenth printed elsewhere."""
    terminal = sys.stderr.isatty()

    async def tell() -> None:
        second = 0
        while True:
            await asyncio.sleep(_PROGRESS_S)
            second += 1
            failed = sum(bool(s.error) for s in drive.samples)
            line = f"{what}: {second} s, {drive.running} running, {len(drive.samples) - failed} done, {failed} failed"
            if terminal:
                click.echo(f"\r\x1b[K{line}", err=True, nl=False)
            elif second % 10 == 0:
                click.echo(line, err=True)

    task = asyncio.ensure_future(tell())
    try:
        yield
    finally:
        task.cancel()
        if terminal:
            click.echo("\r\x1b[K", err=True, nl=False)
