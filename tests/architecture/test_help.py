"""The README's table of commands and its examples agree with the command line; help texts are as recorded."""

import re

import click
import pytest

from tests.architecture.help_text import SNAPSHOT, commands, rendered
from tests.architecture.readme import README, spoken


def test_each_command_has_a_row_in_the_readme_and_no_row_is_without_command() -> None:
    table = set(re.findall(r"^\| `inferd ([a-z]+)", README, re.MULTILINE))
    assert table == {path[0] for path in commands() if path}


def known_flags(command: click.Command) -> set[str]:
    return {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("words", spoken("inferd"), ids=" ".join)
def test_every_call_of_inferd_in_the_readme_is_one_that_exists(words: list[str]) -> None:
    tree = commands()
    path: tuple[str, ...] = ()
    rest = words[1:]
    while rest and (*path, rest[0]) in tree:
        path, rest = (*path, rest[0]), rest[1:]
    command = tree[path]
    assert not (isinstance(command, click.Group) and rest and not rest[0].startswith("-")), f"no such command: {words}"
    flags = {word.split("=")[0] for word in rest if word.startswith("-")}
    assert flags <= known_flags(command)


def test_help_texts_are_as_recorded() -> None:
    assert rendered() == SNAPSHOT.read_text(), "if the change is meant: python -m tests.architecture.help_text"
