"""`inferd bench`: measure a server from outside, any OpenAI-compatible one; soak it, compare, switch features off.

Owns the flags, the output and the exit code; daemon/load and daemon/lab do the work. Enter at `command`.
"""

import json
from typing import Any

import click

from daemon.lab import features
from daemon.load.scenarios import ARRIVALS, SCENARIOS, Lengths

_PHASES = ("short", "long", "mixed")  # daemon.lab.soak.PHASES; named here so that --help loads nothing


class _LengthsType(click.ParamType[Lengths]):
    """`N` or `LOW:HIGH` tokens."""

    name = "N|LOW:HIGH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        try:
            return value if isinstance(value, Lengths) else Lengths.parse(value)
        except ValueError as reason:
            self.fail(str(reason), param, ctx)


def _report_option(function: Any) -> Any:
    return click.option(
        "--report", default="", metavar="FILE.html", help="Also write a page with plots, and its JSON beside it."
    )(function)


def _consistent(given: set[str]) -> None:
    """Raises UsageError if two of the flags given say what arrives, or one says how that does not."""
    for one, others in (
        ("rate", {"concurrency", "requests", "journal", "trace"}),
        ("journal", {"concurrency", "requests", "trace", "scenario"}),
        ("trace", {"concurrency", "requests", "scenario"}),
    ):
        if one in given and (both := sorted(given & others)):
            raise click.UsageError(
                f"--{one} sends requests as they arrive: it cannot be combined with --{' or --'.join(both)}"
            )
    for name in ("duration", "arrival"):
        if name in given and "rate" not in given:
            raise click.UsageError(f"--{name} needs --rate")


@click.group()
def command() -> None:
    """Measure a server from outside, and prove what an optimisation does."""


@command.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Base URL, with or without /v1.")
@click.option("--model", default="", help="Model to ask for.  [default: the first one the server lists]")
@click.option("--scenario", type=click.Choice(SCENARIOS), default="short", show_default=True, help="Which lengths.")
@click.option("--concurrency", type=click.IntRange(1), default=8, show_default=True, help="Requests under way at once.")
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="Requests in all.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Instead: so many a second, as they arrive.")
@click.option(
    "--arrival", type=click.Choice(ARRIVALS), default="poisson", show_default=True, help="With --rate: how they arrive."
)
@click.option(
    "--duration", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, help="With --rate: seconds."
)
@click.option("--prompt-tokens", type=_LengthsType(), help="Replace the scenario's prompt lengths (uniform).")
@click.option("--output-tokens", type=_LengthsType(), help="Replace the scenario's output lengths (uniform).")
@click.option("--ignore-eos", is_flag=True, help="Answers as long as asked for.  [inferd, vLLM, SGLang]")
@click.option("--journal", default="", help="Instead: the requests of this journal, as they arrived.")
@click.option("--trace", default="", help="Instead: a JSONL file of at_s, prompt_tokens, output_tokens.")
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
@_report_option
@click.option("--socket", default="", help="For the report: that inferd's control socket.  [default: by its port]")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def load(ctx: click.Context, /, as_json: bool, **flags: Any) -> None:
    """Send seeded chat requests to any OpenAI-compatible server and report latencies, rates and errors.

    Closed loop by default (--concurrency, --requests); open loop with --rate and --duration, or as --journal or --trace
    recorded it. Ctrl-C prints the report
    of what was measured so far. Exit code 1 if no request succeeded.
    """
    explicit = {name for name in flags if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT}
    _consistent(explicit)
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


@command.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Base URL, with or without /v1.")
@click.option("--socket", default="", help="Its control socket.  [default: of the inferd that runs here]")
@click.option("--model", default="", help="Model to ask for.  [default: the first one the server lists]")
@click.option(
    "--phase", "phases", type=click.Choice(_PHASES), multiple=True, help="Only this one; repeatable.  [default: all]"
)
@click.option(
    "--phase-seconds",
    type=click.FloatRange(1),
    default=1800.0,
    show_default=True,
    help="How long each is held, after the climb.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same requests.")
@click.option("--timeout", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds of one request.")
@click.option(
    "--api-key-env", default="OPENAI_API_KEY", show_default=True, help="Environment variable with the API key."
)
@_report_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def soak(ctx: click.Context, /, phases: tuple[str, ...], report: str, as_json: bool, **flags: Any) -> None:
    """Does a running inferd stay as it is? Short prompts at high concurrency, long ones at medium, then a mixture.

    Each phase is driven until memory in use reaches the 70 % watermark (or it says why it cannot), then held. Judged by
    slopes, not averages: memory of every owner, time to first token, gaps, queue, throughput. Exit code 0 steady,
    1 something drifts or fails, 3 too short to be judged. Ctrl-C ends it with its report.
    """
    from daemon.lab import record, shelf
    from daemon.lab.soak import Soak, exit_code, render, soaked

    if report:
        shelf.check(report)
    found, interrupted = soaked(Soak(phases=phases or _PHASES, **flags))
    if report:
        shelf.keep(report, found)
    click.echo(record.encode(found) if as_json else render(found))
    ctx.exit(130 if interrupted else exit_code(found))


@command.command()
@click.argument("model", default="smollm2")
@click.option(
    "--feature",
    "chosen",
    type=click.Choice(features.NAMES),
    multiple=True,
    help="Only this one; repeatable.  [default: all]",
)
@click.option("--alone/--no-alone", default=True, show_default=True, help="Also each feature with all others off.")
@click.option("--requests", type=click.IntRange(2), default=48, show_default=True, help="Requests of one run.")
@click.option(
    "--concurrency", type=click.IntRange(1), default=12, show_default=True, help="Requests under way at once."
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs of each side, interleaved.")
@click.option("--longest", type=click.IntRange(64), default=2048, show_default=True, help="Longest context, in tokens.")
@click.option("--rows", type=click.IntRange(1), default=16, show_default=True, help="Sequences that run at once.")
@click.option("--memory-limit", default="", metavar="SIZE", help="For each daemon, e.g. 1200MiB.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same requests.")
@_report_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def ablate(chosen: tuple[str, ...], report: str, as_json: bool, **flags: Any) -> None:
    """What is each optimisation worth? Off alone, on alone, and against all on.

    Starts a daemon of MODEL for every run, with one feature switched off (or all others), sends each the same seeded
    load, and repeats that in turns. Says how throughput, latencies and memory change, with 95 % intervals; what is not
    significant is marked. Needs a quiet machine, and for every run about a start and the load's time.
    """
    from daemon.lab import record, shelf
    from daemon.lab.ablate import Ablation, ablated, render

    if report:
        shelf.check(report)
    found = ablated(Ablation(features=chosen, **flags))
    if report:
        shelf.keep(report, found)
    click.echo(record.encode(found) if as_json else render(found))


@command.command()
@click.argument("before", type=click.Path(dir_okay=False), metavar="A.json")
@click.argument("after", type=click.Path(dir_okay=False), metavar="B.json")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def compare(before: str, after: str, as_json: bool) -> None:
    """What changed from report A to report B, which figures differ, and is it noise?

    Both are the .json of a --report. With repetitions a difference has a 95 % interval; without, that is said.
    """
    from pathlib import Path

    from daemon.lab import record
    from daemon.lab.compare import compared, render

    found = compared(record.load(Path(before)), record.load(Path(after)))
    click.echo(json.dumps(found, indent=2) if as_json else render(found))
