"""`inferd bench`: measure a server from outside. `load` works against any OpenAI-compatible one.

Owns the flags, the progress line and the exit code; daemon/load does the work. Enter at `command`.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from daemon.load.workload import SCENARIOS, Lengths, Workload, arrivals, scenario

if TYPE_CHECKING:
    from daemon.load.drive import Drive

_PROGRESS_S = 1.0


class _LengthsType(click.ParamType[Lengths]):
    """`N` or `LOW:HIGH` tokens."""

    name = "N|LOW:HIGH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        try:
            return value if isinstance(value, Lengths) else Lengths.parse(value)
        except ValueError as reason:
            self.fail(str(reason), param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The flags of one `bench load`."""

    url: str
    model: str
    scenario: str
    concurrency: int
    requests: int
    rate: float | None
    duration: float
    prompt_tokens: Lengths | None
    output_tokens: Lengths | None
    seed: int
    timeout: float
    api_key_env: str

    @property
    def load(self) -> str:
        """How requests are sent, in words."""
        if self.rate is not None:
            return f"{self.rate:g} requests/s for {self.duration:g} s"
        return f"{self.requests} requests, {self.concurrency} at a time"


@click.group()
def command() -> None:
    """Measure a server from outside."""


@command.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Base URL, with or without /v1.")
@click.option("--model", default="", help="Model to ask for.  [default: the first one the server lists]")
@click.option(
    "--scenario", type=click.Choice(sorted(SCENARIOS)), default="short", show_default=True, help="Which lengths."
)
@click.option("--concurrency", type=click.IntRange(1), default=8, show_default=True, help="Requests under way at once.")
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="Requests in all.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Instead: so many a second, as they arrive.")
@click.option(
    "--duration", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, help="With --rate: seconds."
)
@click.option("--prompt-tokens", type=_LengthsType(), help="Replace the scenario's prompt lengths (uniform).")
@click.option("--output-tokens", type=_LengthsType(), help="Replace the scenario's output lengths (uniform).")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same requests.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds one request may take.",
)
@click.option(
    "--api-key-env", default="OPENAI_API_KEY", show_default=True, help="Environment variable with the API key."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def load(ctx: click.Context, /, as_json: bool, **flags: Any) -> None:
    """Send seeded chat requests to any OpenAI-compatible server and report latencies, rates and errors.

    Closed loop by default (--concurrency, --requests); open loop with --rate and --duration. Ctrl-C prints the report
    of what was measured so far. Exit code 1 if no request succeeded.
    """
    explicit = {name for name in flags if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT}
    if flags["rate"] is not None and explicit & {"concurrency", "requests"}:
        raise click.UsageError(
            "--rate sends requests as they arrive: it cannot be combined with --concurrency or --requests"
        )
    if flags["rate"] is None and "duration" in explicit:
        raise click.UsageError("--duration needs --rate")
    report = asyncio.run(_measure(_Asked(**flags)))
    from daemon.load.report import render

    click.echo(json.dumps(report, indent=2) if as_json else render(report))
    if report["interrupted"]:
        ctx.exit(130)
    ctx.exit(0 if report["requests"]["ok"] else 1)


async def _measure(asked: _Asked) -> dict[str, Any]:
    """The report of one run. Raises click.ClickException if the server cannot be measured."""
    from daemon.load.client import TargetError, connect
    from daemon.load.drive import Drive
    from daemon.load.report import Run, summarize

    shares = scenario(asked.scenario, asked.prompt_tokens, asked.output_tokens)
    # As many connections as requests under way, so that the pool's queue never hides in the server's figures.
    connections = 0 if asked.rate is not None else asked.concurrency
    async with connect(asked.url, asked.model, os.environ.get(asked.api_key_env, ""), connections) as client:
        client.timeout_s = asked.timeout
        try:
            sizer = await client.prepare()
        except TargetError as reason:
            raise click.ClickException(str(reason)) from None
        drive = Drive(Workload(shares, asked.seed, sizer), client.ask)
        with _interruptible(drive), _progress(drive, asked.load):
            if asked.rate is not None:
                await drive.open(arrivals(asked.rate, asked.duration, asked.seed))
            else:
                await drive.closed(asked.concurrency, asked.requests)
        about = {
            "url": client.url,
            "model": client.model,
            "scenario": asked.scenario,
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
        return summarize(run)


@contextmanager
def _interruptible(drive: "Drive") -> Iterator[None]:
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
def _progress(drive: "Drive", what: str) -> Iterator[None]:
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
