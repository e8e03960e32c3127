"""`inferd doctor`: what is wrong, the evidence, and what to do next. Works on a daemon that is busy, wedged or dead.

Owns the flags, finding the daemon, and the exit code; runbooks/ gathers and judges. It asks the control socket, never
the API. Enter at `command`.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from daemon import remedies
from daemon.settings import Loaded, load
from engine.errors import ConfigError, InferdError
from runbooks import bundle, check, gather, machine, report
from runbooks.evidence import Evidence
from telemetry.client import SOCKET_NAME, Client, ClientError, Endpoint, find
from telemetry.events import Finding

_PATIENCE_SECONDS = 1.5  # for the control socket: the doctor is to answer within two, also when nobody else does


@click.group(invoke_without_command=True, short_help="Say what is wrong, and what to do next.")
@click.option("--socket", "socket_path", metavar="PATH", default="", help="Control socket; else it is looked for.")
@click.option("--url", metavar="URL", default="", help="Admin port of a daemon elsewhere; key in $INFERD_ADMIN_KEY.")
@click.option("--offline", metavar="DIR", type=click.Path(), help="State directory of a daemon that is dead.")
@click.option(
    "--since", "since_seconds", type=click.FloatRange(1), help="Look no further back, e.g. than a remedy (s)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--watch", is_flag=True, help="Look again every 5 s until Ctrl-C.")
@click.option("--bundle", "bundle_path", metavar="FILE", help="Also write all that was seen to a .tar.gz.")
@click.pass_context
def command(
    ctx: click.Context, /, socket_path: str, url: str, offline: str | None, as_json: bool, watch: bool, **more: Any
) -> int:
    """Look at a running daemon, or at what a dead one left, and say what is wrong, worst first.

    Without flags it finds the daemon of this machine; if none answers, it reads the state directory. It also checks the
    installation. Exit code: 0 healthy or only remarks, 10 a warning, 20 something critical.
    """
    if ctx.invoked_subcommand is not None:
        return 0
    while True:
        evidence = _evidence(socket_path, url, offline)
        if more["since_seconds"] is not None:
            evidence = evidence.within(more["since_seconds"])
        findings = _examined(evidence, own=more["since_seconds"] is None)
        _print(evidence, findings, as_json)
        if more["bundle_path"]:
            _bundle(Path(more["bundle_path"]), evidence, findings)
        if not watch:
            return report.exit_code(findings)
        time.sleep(5.0)


@command.command()
@click.argument("name", required=False)
@click.argument("section", required=False)
def runbook(name: str | None, section: str | None) -> int:
    """Print runbook NAME, or its SECTION; without a name, list them all."""
    books = {each.name: each for each in check.shelf()}
    if name is None:
        for each in books.values():
            click.echo(f"{each.name:<16} {each.text.splitlines()[0].lstrip('# ')}")
        return 0
    book = books.get(name)
    if book is None:
        raise ConfigError(f"there is no runbook {name!r}", f"there are: {', '.join(check.names())}")
    part = book.text if section is None else book.section(section)
    if part is None:
        raise ConfigError(f"runbook {name} has no section {section!r}", f"it has: {', '.join(book.sections)}")
    click.echo(part, nl=False)
    return 0


@command.command(name="do")
@click.argument("action", type=click.Choice(list(remedies.ACTIONS)))
@click.argument("words", nargs=-1)
@click.pass_context
def do_command(ctx: click.Context, /, action: str, words: tuple[str, ...]) -> int:
    """Do what a runbook says: set NAME=VALUE… (live limits), abort ID, drain, resume, reset-cache, restart-engine."""
    given = ctx.parent.params if ctx.parent else {}
    try:
        client = Client(_endpoint(given["socket_path"], given["url"]))
        click.echo(remedies.act(client, action, words))
    except ClientError as error:
        raise InferdError(error.message, error.hint) from None
    return 0


@command.command()
@click.argument("model", required=False)
@click.option("--only", multiple=True, metavar="NAME", help="This drill only; repeat it for more.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
def gameday(model: str | None, only: tuple[str, ...], as_json: bool) -> int:
    """Try the instruments: each fault drill on a scratch daemon of its own, with MODEL or a tiny random one.

    Of each it says whether the metric moved, the alert would fire, the finding was made first and the remedy works.
    The machine's own daemon is not touched. Takes some minutes. Exit code 1 if anything is missing.
    """
    from daemon.gameday.command import run

    return run(model, only, as_json)


def _endpoint(socket_path: str, url: str) -> Endpoint:
    return find(socket_path or _own_socket(), url, os.environ.get("INFERD_ADMIN_KEY", ""))


def _own_socket() -> str:
    """The socket in this environment's own runtime directory, as a unit's commands have it; else it is looked for."""
    given = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    path = Path(given) / SOCKET_NAME
    return str(path) if given and path.exists() and not os.environ.get("INFERD_SOCKET") else ""


def _evidence(socket_path: str, url: str, offline: str | None) -> Evidence:
    """Of the daemon that answers, else of the state directory. Raises InferdError for what was asked for by name."""
    if offline is not None:
        if not Path(offline).is_dir():
            raise ConfigError(f"{offline} is not a directory", "name a state directory, e.g. /var/lib/inferd")
        return gather.offline(Path(offline))
    loaded, wrong = _settings()
    try:
        evidence = gather.live(Client(_endpoint(socket_path, url), _PATIENCE_SECONDS))
    except ClientError as error:
        if url or "several" in error.message:
            raise InferdError(error.message, error.hint) from None
        evidence = gather.offline(_state_dir(), error.message)
    if wrong:
        evidence = gather.noted(evidence, "settings", wrong)
    return evidence if url else gather.inspected(evidence, machine.troubles(_place(evidence, loaded)))


def _state_dir() -> Path:
    from daemon.paths import state_dir

    return state_dir()


def _settings() -> tuple[Loaded | None, str]:
    """What a start from here would use, or why it could not."""
    try:
        return load(), ""
    except ConfigError as error:
        return None, str(error)


def _place(evidence: Evidence, loaded: Loaded | None) -> machine.Place:
    """Where a start from here would write and listen; with the daemon's own settings if it told them."""
    from daemon import paths

    shown: Mapping[str, Any] = evidence.settings or (loaded.public() if loaded else {})
    state = evidence.host.state_dir
    return machine.Place(
        settings={name: entry.get("value") for name, entry in shown.items()},
        directories={"state": Path(state) if state else paths.state_dir(), "cache": paths.cache_dir()},
        running=evidence.source == "live" or (evidence.life is not None and evidence.life.alive),
    )


def _examined(evidence: Evidence, own: bool) -> list[Finding]:
    """The checks' findings, and, if `own`, those that the daemon's rounds made and only they could: these may be about
    what was before."""
    found = check.examine(evidence)
    if not own or evidence.source != "live":
        return found
    known = {each.runbook for each in found}
    more = [each for each in evidence.snapshot.findings or [] if each.runbook not in known]
    return check.ranked([*found, *more])


def _print(evidence: Evidence, findings: list[Finding], as_json: bool) -> None:
    click.echo(json.dumps(report.as_json(evidence, findings)) if as_json else report.text(evidence, findings))


def _bundle(path: Path, evidence: Evidence, findings: list[Finding]) -> None:
    try:
        members = bundle.write(path, evidence, findings)
    except OSError as error:
        raise InferdError(f"cannot write {path}: {error.strerror}", "name another file after --bundle") from error
    click.echo(f"bundle: {path} ({len(members)} files; no secrets, no prompts)", err=True)
