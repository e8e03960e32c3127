"""The command line: finds the commands in daemon/commands, runs one, turns errors into one line and an exit code.

Each module there exposes `command: click.Command`; it is imported only when it is called or listed, and none imports
torch. Enter at `main`.
"""

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import click

from engine.errors import InferdError

_HOME = Path(__file__).resolve().parent


class Commands(click.Group):
    """The modules of daemon/commands, by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(path.stem for path in (_HOME / "commands").glob("*.py") if path.stem != "__init__")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = importlib.import_module(f"daemon.commands.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `inferd --help`, from the first lines of the modules: importing them all would take its time."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(name)) for name in self.list_commands(ctx)])


def _summary(command: str) -> str:
    """What a command does: its module's docstring up to the first full stop, without '`inferd NAME`: '."""
    source = (_HOME / "commands" / f"{command}.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    text = docstring.split(": ", 1)[-1].split(". ")[0].split(".\n")[0]
    return (text[:1].upper() + text[1:]).rstrip(".").replace("\n", " ") + "."


def version() -> str:
    """Of the installed distribution, or what a bare checkout says of itself."""
    from importlib import metadata  # a fifth of the time that `inferd --help` may take

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


def _show_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo(f"inferd {version()}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="The version.")
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
