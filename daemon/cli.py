"""The command line: finds the commands in daemon/commands, runs one, turns errors into one line and an exit code.

Each module there exposes `command: click.Command`; it is imported only when it is called or listed, and none imports
torch. Enter at `main`.
"""

import importlib
import pkgutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from engine.errors import InferdError

_HOME = Path(__file__).resolve().parent


class Commands(click.Group):
    """The modules of daemon/commands, by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(module.name for module in pkgutil.iter_modules([str(_HOME / "commands")]))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = importlib.import_module(f"daemon.commands.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command


def version() -> str:
    """Of the installed distribution, or what a bare checkout says of itself."""
    try:
        return metadata.version("inferd")
    except metadata.PackageNotFoundError:
        return "0 (checkout)"


def check_packages() -> None:
    """Our packages have plain names, so another distribution may have put a package of the same name in their place
    (python-daemon installs `daemon`). Raises InferdError that says which."""
    for name in ("daemon", "engine", "telemetry"):
        module = importlib.import_module(name)
        file = Path(module.__file__ or "").resolve()
        if file.parent != _HOME.parent / name or hasattr(module, "DaemonContext"):
            raise InferdError(
                f"the package {name!r} at {file} is not inferd's",
                "install inferd into a virtual environment of its own",
            )


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version(), prog_name="inferd")
def inferd() -> None:
    """inferd serves open language models from this machine, and can say where every millisecond and byte went."""


def run(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit code. Errors are one line on stderr."""
    try:
        check_packages()
        done: Any = inferd.main(arguments, prog_name="inferd", standalone_mode=False)
        return done if isinstance(done, int) else 0
    except InferdError as error:
        click.echo(f"inferd: {error}", err=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("inferd: interrupted", err=True)
        return 130
    except BrokenPipeError:
        return 0  # whoever read our output has seen enough


def main() -> None:
    """The `inferd` command."""
    sys.exit(run())
