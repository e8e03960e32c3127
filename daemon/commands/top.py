"""`inferd top`: watch a daemon live: latency, memory, KV blocks, steps, requests, tuner, findings. Works over SSH.

Owns the flags, finding the daemon, and what is printed with --once and --json; tui/ does the rest, and is imported only
when it is shown. Enter at `command`.
"""

import importlib.util
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.errors import ConfigError, InferdError

if TYPE_CHECKING:
    from telemetry.client import Endpoint
    from tui.feed import Feed

_ONCE_S = 1.8  # scripts and tired people wait two seconds, not more


class NoAnswer(InferdError):
    """No daemon was found, or it did not answer."""

    code = "no_answer"
    exit_code = 8


@click.command(short_help="Watch a daemon live.")
@click.option("--socket", "socket_path", metavar="PATH", default="", help="Its control socket.  [default: found]")
@click.option("--url", default="", help="Or its admin address, e.g. http://host:9000; needs --key-file.")
@click.option("--key-file", type=click.Path(dir_okay=False, path_type=Path), help="File with the admin key.")
@click.option("--once", is_flag=True, help="Print the overview once as plain text and end.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole snapshot once as JSON and end.")
@click.option(
    "--replay", metavar="FILE", type=click.Path(exists=True, path_type=Path), help="Show a journal, ring or bundle."
)
@click.option(
    "--serve", "port", metavar="PORT", type=click.IntRange(1, 65535), help="Serve it to a browser, on loopback."
)
def command(
    socket_path: str, url: str, key_file: Path | None, once: bool, as_json: bool, replay: Path | None, port: int | None
) -> int:
    """Watch a running daemon, act on it, or look at a recording of one that is gone.

    It is found as the environment says ($INFERD_SOCKET, /run/inferd*, the user's own runtime directory), or by --socket
    or --url. Keys: ? shows them. NO_COLOR is honoured. Exit code 8: no daemon answered.
    """
    if replay is not None and (socket_path or url):
        raise click.UsageError("--replay shows a file: it cannot be combined with --socket or --url")
    if port is not None and (once or as_json):
        raise click.UsageError("--serve cannot be combined with --once or --json")
    if port is not None:
        return _serve(port, _flags(socket_path, url, key_file, replay))
    if once or as_json:
        return _print(socket_path, url, key_file, replay, as_json)
    _need_textual()
    from tui.app import Top
    from tui.feed import LiveFeed

    endpoint = None if replay is not None else _endpoint(socket_path, url, key_file)
    feed: Feed = LiveFeed(endpoint) if endpoint is not None else _replayed(replay or Path())
    socket = str(endpoint.socket or "") if endpoint else ""
    Top(feed, runbook=runbook, prefix=(sys.executable, "-c", _MAIN), socket=socket, remote=bool(url)).run()
    return 0


_MAIN = "from daemon.cli import main; main()"  # the `inferd` of this very installation


def runbook(name: str) -> str | None:
    """A runbook's Markdown, as it is installed here; None if there is none of that name."""
    import runbooks

    path = Path(next(iter(runbooks.__path__))) / f"{name}.md"
    return path.read_text(encoding="utf-8") if re.fullmatch(r"\w+", name) and path.exists() else None


def _need_textual() -> None:
    if importlib.util.find_spec("textual") is None:
        raise ConfigError("`inferd top` needs Textual", "pip install 'inferd[tui]'; --once and --json work without")


def _endpoint(socket_path: str, url: str, key_file: Path | None) -> "Endpoint":
    from telemetry.client import ClientError, find

    try:
        key = key_file.read_text(encoding="utf-8").strip() if key_file else ""
    except OSError as error:
        raise ConfigError(f"cannot read {key_file}: {error.strerror}") from error
    try:
        return find(socket_path, url, key)
    except ClientError as error:
        raise NoAnswer(error.message, f"{error.hint}; of one that is gone: `inferd top --replay`") from error


def _replayed(path: Path) -> "Feed":
    from tui.replay import Replay, Unreadable

    try:
        return Replay(path)
    except Unreadable as error:
        raise ConfigError(str(error)) from error


def _print(socket_path: str, url: str, key_file: Path | None, replay: Path | None, as_json: bool) -> int:
    """One snapshot; what only the engine knows is not asked for, so that a wedged one does not hold it up."""
    from telemetry import snapshot as snapshots
    from telemetry.client import Client, ClientError
    from tui.report import report

    if replay is not None:
        from tui.replay import last

        snapshot = last(replay)
    else:
        try:
            snapshot = Client(_endpoint(socket_path, url, key_file), _ONCE_S).snapshot()
        except ClientError as error:
            raise NoAnswer(error.message, error.hint) from error
    if as_json:
        click.echo(snapshots.encode(snapshot))
    else:
        click.echo(report(snapshot, shutil.get_terminal_size((80, 24)).columns))
    return 0


def _flags(socket_path: str, url: str, key_file: Path | None, replay: Path | None) -> list[str]:
    """What a tab's own `inferd top` is called with."""
    given = {"--socket": socket_path, "--url": url, "--key-file": key_file, "--replay": replay}
    return [word for flag, value in given.items() if value for word in (flag, str(value))]


def _serve(port: int, flags: Sequence[str]) -> int:
    _need_textual()
    if importlib.util.find_spec("textual_serve") is None:
        raise ConfigError("--serve needs textual-serve", "pip install 'inferd[tui]'")
    from tui.browser import serve

    def announce(address: str) -> None:
        click.echo(f"inferd top: open {address} (ends with Ctrl-C)")

    try:
        serve([sys.executable, "-c", _MAIN, "top", *flags], port, announce)
    except OSError as error:
        raise ConfigError(f"cannot listen on port {port}: {error.strerror or error}", "choose another one") from error
    return 0
