"""The help of every command as one text. `python -m tests.architecture.help_text` records it as help.txt."""

from pathlib import Path

import click

from daemon import cli

SNAPSHOT = Path(__file__).with_name("help.txt")
_WIDTH = 100


def commands() -> dict[tuple[str, ...], click.Command]:
    """Every command by its path below `inferd`, groups too."""
    found: dict[tuple[str, ...], click.Command] = {}

    def visit(path: tuple[str, ...], command: click.Command) -> None:
        found[path] = command
        if isinstance(command, click.Group):
            context = click.Context(command, info_name=path[-1] if path else "inferd")
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None, name
                visit((*path, name), child)

    visit((), cli.inferd)
    return found


def rendered() -> str:
    """All help texts, as they are shown, at a fixed width."""
    parts, settings = [], {**cli.inferd.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    for path, command in commands().items():
        name = " ".join(("inferd", *path))
        context = click.Context(command, info_name=name, **settings)
        parts.append(f"$ {name} --help\n{command.get_help(context)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    SNAPSHOT.write_text(rendered(), encoding="utf-8")
