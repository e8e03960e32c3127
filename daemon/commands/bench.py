"""`inferd bench`: measure a server from outside. `load` works against any OpenAI-compatible one.

Owns the flags, the output and the exit code; daemon/load does the work. Enter at `command`.
"""

import json
from typing import Any

import click

from daemon.load.scenarios import SCENARIOS, Lengths


class _LengthsType(click.ParamType[Lengths]):
    """`N` or `LOW:HIGH` tokens."""

    name = "N|LOW:HIGH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        try:
            return value if isinstance(value, Lengths) else Lengths.parse(value)
        except ValueError as reason:
            self.fail(str(reason), param, ctx)


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
@click.option("--report", default="", metavar="FILE.html", help="Also write a page with plots, and its JSON beside it.")
@click.option("--socket", default="", help="For the report: that inferd's control socket.  [default: by its port]")
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
    from daemon.lab.shelf import check
    from daemon.load.measure import Asked, measured  # here: asyncio and aiohttp would slow down every --help
    from daemon.load.report import render

    if flags["report"]:
        check(flags["report"])
    report = measured(Asked(**flags))

    click.echo(json.dumps(report, indent=2) if as_json else render(report))
    if report["interrupted"]:
        ctx.exit(130)
    ctx.exit(0 if report["requests"]["ok"] else 1)
