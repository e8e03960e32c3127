"""`inferd tune`: what the tuner did and learned, what it would do, and a search for start-up settings.

Owns the flags and the output; autotune/ and daemon/lab do the work. Enter at `command`.
"""

import json
import os
from typing import Any

import click

_PRESETS = ("agent", "batch", "chat")  # autotune.objective.PRESETS; named here so that --help loads nothing
_ARRIVALS = ("bursty", "diurnal", "poisson", "switching")
_LENGTHS = ("agent", "bimodal", "fixed", "heavy", "lognormal", "long", "mixed", "shared", "short", "turns")
_OBJECTIVES = ("goodput", "throughput", "ttft", "inter-token", "memory")  # daemon.lab.trial.OBJECTIVES
_KNOBS = ("block_size", "dtype", "threads", "max_num_seqs", "max_num_batched_tokens")  # daemon.lab.knobs.NAMES
_KEY_VARIABLE = "INFERD_ADMIN_KEY"


class _Span(click.ParamType[float]):
    """A time such as 90s, 30m or 2h, in seconds."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        number, unit = str(value)[:-1], {"s": 1, "m": 60, "h": 3600}.get(str(value)[-1:])
        if unit is None or not number.replace(".", "", 1).isdecimal():
            self.fail(f"{value!r} is not a time such as 90s, 30m or 2h", param, ctx)
        return float(number) * unit


@click.group()
def command() -> None:
    """See and steer the tuner, ask the simulator, search for start-up settings."""


def _where(function: Any) -> Any:
    """The flags that name a daemon."""
    for option in (
        click.option("--url", default="", help=f"A daemon's admin URL; its key comes from ${_KEY_VARIABLE}."),
        click.option("--socket", default="", help="A daemon's control socket.  [default: the one that runs]"),
    ):
        function = option(function)
    return function


@command.command()
@_where
@click.option("--learned", default="", help="Instead of a daemon: what was learned for a model of this name.")
@click.option(
    "--lengths", type=click.Choice(_LENGTHS), default="lognormal", show_default=True, help="How long requests are."
)
@click.option("--arrival", type=click.Choice(_ARRIVALS), default="poisson", show_default=True, help="How they arrive.")
@click.option("--rate", type=click.FloatRange(0), default=0.0, help="Requests a second on average.")
@click.option(
    "--users", type=click.IntRange(0), default=0, help="Instead: so many, each waiting for the answer.  [default: 8]"
)
@click.option("--journal", default="", help="Instead: the requests of this journal.")
@click.option("--trace", default="", help="Instead: a JSONL file of at_s, prompt_tokens, output_tokens.")
@click.option("--times", type=click.FloatRange(0, min_open=True), default=1.0, help="Also at so many times the load.")
@click.option("--replicas", is_flag=True, help="How many replicas would be enough for this load?")
@click.option("--for", "purpose", type=click.Choice(_PRESETS), help="The targets of a preset.")
@click.option("--ttft", type=click.FloatRange(0), default=0.0, help="Target of time to first token, p95, in seconds.")
@click.option(
    "--inter-token", type=click.FloatRange(0), default=0.0, help="Target of the gap between tokens, p95, in seconds."
)
@click.option("--seconds", type=click.FloatRange(1), default=600.0, show_default=True, help="Simulated time.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same requests.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def simulate(socket: str, url: str, learned: str, as_json: bool, **flags: Any) -> None:
    """What would this engine do under another load?

    The real scheduler and block pool run against a model of this machine's step times, in virtual time. It is
    calibrated by a running daemon, or by what the tuner learned of the last one.
    """
    from daemon.lab.calibrate import calibration
    from daemon.lab.simulation import Question, answered, render
    from daemon.paths import state_dir

    given = [name for name in ("rate", "users", "journal", "trace") if flags[name]]
    if len(given) > 1:
        raise click.UsageError(f"--{given[0]} and --{given[1]} both say what arrives: give one")
    if not given:
        flags["users"] = 8
    flags["purpose"] = flags["purpose"] or ""
    known = calibration(socket, url, os.environ.get(_KEY_VARIABLE, ""), state_dir(), learned)
    report = answered(Question(**flags), known)
    click.echo(json.dumps(report, indent=2) if as_json else render(report))


@command.command()
@_where
@click.option("--count", type=click.IntRange(1), default=50, show_default=True, help="How many decisions, the newest.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def log(socket: str, url: str, count: int, as_json: bool) -> None:
    """Every change of the tuner: what it saw, what it expected, what came of it.

    Of the running daemon if there is one, else of the journal that the last one left.
    """
    from daemon.lab import decisions

    found = decisions.known(socket, url, os.environ.get(_KEY_VARIABLE, ""))[-count:]
    for when, decision in found:
        click.echo(decisions.as_json(when, decision) if as_json else decisions.as_text(when, decision))
    if not found and not as_json:
        click.echo("No limit was changed so far.")


@command.command()
@_where
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def status(socket: str, url: str, as_json: bool) -> None:
    """What the tuner is doing, every live limit with its bounds and its reason, and targets that cannot be met."""
    from daemon.lab import decisions

    known = json.loads(decisions.client(socket, url, os.environ.get(_KEY_VARIABLE, "")).get(decisions.ROUTE))
    click.echo(json.dumps(known, indent=2) if as_json else decisions.status_text(known))


def _order(socket: str, url: str, body: dict[str, Any]) -> None:
    from daemon.lab import decisions

    answer = decisions.client(socket, url, os.environ.get(_KEY_VARIABLE, "")).post(decisions.ROUTE, body)
    click.echo(decisions.status_text(answer["tuner"]))


@command.command()
@_where
def freeze(socket: str, url: str) -> None:
    """Keep every limit as it is."""
    _order(socket, url, {"freeze": True})


@command.command()
@_where
def release(socket: str, url: str) -> None:
    """Let the tuner go on, with every limit that was set or pinned by hand."""
    _order(socket, url, {"release": True})


@command.command()
@_where
@click.argument("limits", nargs=-1, required=True, metavar="LIMIT…")
def pin(socket: str, url: str, limits: tuple[str, ...]) -> None:
    """Take limits away from the tuner, at the values they have."""
    _order(socket, url, {"pin": list(limits)})


@command.command(name="set")
@_where
@click.option("--why", default="asked for with inferd tune set", help="The reason, for whoever asks later.")
@click.argument("limits", nargs=-1, required=True, metavar="LIMIT=VALUE…")
def set_limits(socket: str, url: str, why: str, limits: tuple[str, ...]) -> None:
    """Set limits by hand, and so take them away from the tuner."""
    wanted = {}
    for pair in limits:
        name, _, value = pair.partition("=")
        if not value.isdecimal():
            raise click.UsageError(f"{pair!r} is not LIMIT=VALUE with a whole number")
        wanted[name] = int(value)
    _order(socket, url, {"set": wanted, "why": why})


@command.command()
@click.argument("model", default="smollm2")
@click.option(
    "--objective", type=click.Choice(_OBJECTIVES), default="throughput", show_default=True, help="What counts."
)
@click.option("--budget", type=_Span(), default="30m", show_default=True, help="Time for trials, over all calls.")
@click.option("--trials", type=click.IntRange(1), default=200, show_default=True, help="Most trials, over all calls.")
@click.option(
    "--knob", "knobs", type=click.Choice(_KNOBS), multiple=True, help="Only this one; repeatable.  [default: all]"
)
@click.option("--profile", default="profile.toml", show_default=True, metavar="FILE", help="Where the settings go.")
@click.option("--store", default="search.journal", show_default=True, metavar="FILE", help="Every result; resumes it.")
@click.option(
    "--confirm", type=click.IntRange(0), default=3, show_default=True, help="Best and defaults again, in turns."
)
@click.option("--requests", type=click.IntRange(4), default=32, show_default=True, help="Requests of one trial.")
@click.option(
    "--concurrency", type=click.IntRange(1), default=12, show_default=True, help="Requests under way at once."
)
@click.option("--longest", type=click.IntRange(64), default=2048, show_default=True, help="Longest context, in tokens.")
@click.option("--ttft", type=click.FloatRange(0), default=0.0, help="For goodput: most seconds to a first token.")
@click.option(
    "--inter-token", type=click.FloatRange(0), default=0.0, help="For goodput: most seconds between a request's tokens."
)
@click.option("--memory-limit", default="", metavar="SIZE", help="For each daemon, e.g. 1200MiB.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same requests.")
@click.option("--report", default="", metavar="FILE.html", help="Also write a page with plots, and its JSON beside it.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def search(model: str, profile: str, store: str, report: str, as_json: bool, **flags: Any) -> None:
    """Which start-up settings are best on this machine: block size, dtype, threads, ceilings?

    Starts a daemon of MODEL for each trial, sends it the same seeded load, and stops early what is clearly worse. Ends
    in a profile for `inferd serve --profile`. Every result is kept in the journal: called again with the same flags, it
    goes on where it was, whatever ended it. Live limits are the tuner's, which needs no search.
    """
    from pathlib import Path

    from daemon.lab import record, shelf
    from daemon.lab.search import Search, profile_text, searched
    from daemon.lab.trial import Load

    if report:
        shelf.check(report)
    record.check_writable([Path(profile), Path(store)])
    if flags["objective"] == "goodput" and not (flags["ttft"] or flags["inter_token"]):
        raise click.UsageError("goodput is what meets the targets: give --ttft, --inter-token or both")
    load = Load(
        ttft_s=flags.pop("ttft"),
        inter_token_s=flags.pop("inter_token"),
        **{name: flags.pop(name) for name in ("requests", "concurrency", "longest", "seed")},
    )
    found, settings = searched(Search(model=model, store=Path(store), budget_s=flags.pop("budget"), load=load, **flags))
    record.write(Path(profile), profile_text(found, settings))
    if report:
        shelf.keep(report, found)
    click.echo(record.encode(found) if as_json else "\n".join([*found.notes, f"The profile is {profile}."]))
