"""`inferd bench soak`: three kinds of traffic, each driven to the watermark first and then held for long, and judged.

Owns the phases, the climb and the progress line; judgements are verdicts.py's. Enter at `soaked`, then `render`.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import click
import msgspec

from autotune.space import WATERMARK
from autotune.workload import MIXES, UNBOUNDED
from daemon.lab import record
from daemon.lab.gather import run_of
from daemon.lab.pressure import Pressure
from daemon.lab.record import Report, Run, Verdict
from daemon.lab.verdicts import judged
from daemon.lab.watch import Watch, beside
from daemon.load.client import LoadClient, TargetError, connect
from daemon.load.workload import Sizer, Workload
from telemetry.snapshot import Snapshot

# Which lengths, and how many at a time to begin with.
PHASES: Final = {"short": 32, "long": 8, "mixed": 16}
_MOST_CONCURRENCY = 1024
_CLIMB_STEPS = 12
_LONGEST_SHARE = 0.9  # of the context limit that the longest request may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """The flags."""

    url: str
    socket: str
    model: str
    phases: tuple[str, ...]
    phase_seconds: float
    seed: int
    timeout: float
    api_key_env: str

    @property
    def period_s(self) -> float:
        """Between samples: enough of them for a slope, at most one a second."""
        return min(1.0, self.phase_seconds / 60)

    @property
    def climb_s(self) -> float:
        """Between two steps of the climb."""
        return min(10.0, max(0.5, self.phase_seconds / 20))


def soaked(asked: Soak) -> tuple[Report, bool]:
    """The report, and whether it was interrupted. Raises click.ClickException if the server cannot be soaked."""
    return asyncio.run(_soak(asked))


async def _soak(asked: Soak) -> tuple[Report, bool]:
    started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    runs: list[Run] = []
    verdicts: list[Verdict] = []
    versions: dict[str, str] = {}
    stop = asyncio.Event()
    async with connect(asked.url, asked.model, os.environ.get(asked.api_key_env, "")) as client:
        client.timeout_s = asked.timeout
        try:
            sizer = await client.prepare()
        except TargetError as reason:
            raise click.ClickException(str(reason)) from None
        with _interruptible(stop):
            for number, phase in enumerate(asked.phases):
                if stop.is_set():
                    break
                run, found, versions = await _phase(asked, client, sizer, phase, asked.seed + number, stop)
                runs.append(run)
                verdicts += found
    return (
        Report(
            kind="soak",
            title=f"Soak: {', '.join(asked.phases)}, {asked.phase_seconds:g} s each",
            started_at=started_at,
            model=client.model,
            settings=runs[0].settings if runs else {},
            versions=versions,
            seeds=tuple(run.seed for run in runs),
            machine=record.machine(),
            runs=tuple(msgspec.structs.replace(run, settings={}) for run in runs),
            verdicts=tuple(verdicts),
        ),
        stop.is_set(),
    )


async def _phase(
    asked: Soak, client: LoadClient, sizer: Sizer, phase: str, seed: int, stop: asyncio.Event
) -> tuple[Run, list[Verdict], dict[str, str]]:
    """Climb, then hold. Only what was held is judged."""
    scout = await asyncio.to_thread(beside, asked.url, asked.socket, asked.period_s)
    if scout.why_not:
        raise click.ClickException(
            f"{scout.why_not}; a soak is judged by the server's memory, so it must be an inferd here"
        )
    async with scout:
        assert scout.first is not None
        longest = fitting(scout.first)
        async with Pressure(Workload(MIXES[phase], seed, sizer, longest), client.ask) as pressure:
            pressure.raise_to(PHASES[phase])
            reached = await _climb(asked, phase, pressure, scout, stop)
            begin = len(pressure.samples)
            watch = Watch(scout.endpoint, every_s=asked.period_s)
            async with watch:
                began_s = time.perf_counter()
                await _held(asked, phase, pressure, watch, stop)
                ended_s = time.perf_counter()
            held = pressure.samples[begin:]  # every answer that ended in it
            run = run_of(
                held,
                began_s,
                ended_s,
                side=phase,
                watch=watch,
                seed=seed,
                settings=watch.settings,
                notes=(reached, *_cut(phase, longest)),
            )
    found = [Verdict(name=f"{phase}: driven to the watermark", passed=None, why=reached)]
    return run, [*found, *judged(run, pressure.concurrency)], watch.versions


def fitting(server: Snapshot) -> int:
    """Prompt and answer in tokens that fit into the server's context, its chat template included."""
    return int(_LONGEST_SHARE * server.limits.context_limit) if server.limits else UNBOUNDED


def _cut(phase: str, longest: int) -> list[str]:
    if max(sum(MIXES[phase].draw(random.Random(n))[1:]) for n in range(200)) <= longest:
        return []
    return [f"requests are cut to {longest} tokens, which fit into the server's context"]


async def _climb(asked: Soak, phase: str, pressure: Pressure, watch: Watch, stop: asyncio.Event) -> str:
    """Raise concurrency until memory in use is at the watermark. Returns what came of it, in words."""
    share, why = 0.0, "the climb's time was over"
    for _ in range(_CLIMB_STEPS):
        await _pause(stop, asked.climb_s)
        share = max(share, watch.used_share() or 0.0)
        _say(f"{phase}, climbing: {pressure.concurrency} at a time, memory in use {share:.0%}")
        if share >= WATERMARK:
            return f"reached with {pressure.concurrency} at a time: {share:.0%} in use"
        if stop.is_set():
            return f"interrupted at {share:.0%} in use"
        queue, limits = (watch.last.queue, watch.last.limits) if watch.last else (None, None)
        if queue and limits and queue.waiting > max(2, queue.running // 2):
            held = f"{queue.running} run and {queue.waiting} wait: the limits (max_num_seqs {limits.max_num_seqs}, "
            why = held + f"kv_blocks {limits.kv_blocks}) let no more in"
            break
        if pressure.concurrency >= _MOST_CONCURRENCY:
            why = f"{_MOST_CONCURRENCY} at a time is the most this client sends"
            break
        pressure.raise_to(min(_MOST_CONCURRENCY, pressure.concurrency * 3 // 2 + 1))
    return f"not reached: {share:.0%} in use with {pressure.concurrency} at a time; {why}"


async def _held(asked: Soak, phase: str, pressure: Pressure, watch: Watch, stop: asyncio.Event) -> None:
    before, end = len(pressure.samples), time.perf_counter() + asked.phase_seconds
    terminal = sys.stderr.isatty()
    every_s = 1.0 if terminal else max(1.0, min(60.0, asked.phase_seconds / 10))
    # It is not over before one request has ended, and each does, by its timeout at the latest.
    while not stop.is_set() and ((left := end - time.perf_counter()) > 0 or len(pressure.samples) == before):
        await _pause(stop, min(max(left, 0.1), every_s))
        done, total = asked.phase_seconds - max(0.0, end - time.perf_counter()), asked.phase_seconds
        waiting = watch.last.queue.waiting if watch.last and watch.last.queue else 0
        _say(
            f"{phase}: {done:.0f} of {total:.0f} s, {pressure.running} under way, {waiting} wait, "
            f"{len(pressure.samples) - pressure.failed} done, {pressure.failed} failed, "
            f"memory in use {watch.used_share() or 0.0:.0%}"
        )


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return


def _say(line: str) -> None:
    """One line that is rewritten on a terminal."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{line}", err=True, nl=False)
    else:
        click.echo(line, err=True)


@contextmanager
def _interruptible(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C ends the soak with its report; a second one ends the process as usual."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        if sys.stderr.isatty():
            click.echo("\r\x1b[K", err=True, nl=False)


def exit_code(report: Report) -> int:
    """0 all that could be judged holds, 1 something does not, 3 no slope could be judged."""
    if any(verdict.passed is False for verdict in report.verdicts):
        return 1
    slopes = [verdict for verdict in report.verdicts if "throughput" in verdict.name]
    return 3 if slopes and all(verdict.passed is None for verdict in slopes) else 0


def render(report: Report) -> str:
    """For a person."""
    words = {True: "holds", False: "DOES NOT HOLD", None: "–"}
    lines = [f"{report.model} · {report.title}", ""]
    lines += [f"  {v.name:<44} {words[v.passed]:<14} {v.why}" for v in report.verdicts]
    ending = {
        0: "Steady: nothing that was judged drifts.",
        1: "Not steady: see what does not hold.",
        3: "Too short to be judged: give it longer phases (--phase-seconds).",
    }
    return "\n".join([*lines, "", ending[exit_code(report)]])
