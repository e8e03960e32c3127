"""The README is short and names only make targets that exist; pins are whole and agree; every flag has a help text."""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import click

from tests.architecture.help_text import commands
from tests.architecture.readme import README, spoken
from tests.architecture.source import REPO

MAKEFILE = (REPO / "Makefile").read_text(encoding="utf-8")


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 250


def test_every_make_target_named_exists_and_every_target_says_what_it_does() -> None:
    targets = set(re.findall(r"^([a-z]+):.*## ", MAKEFILE, re.MULTILINE))
    declared = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)
    assert declared
    assert set(declared[1].split()) == targets
    named = {words[1] for words in spoken("make")}
    assert {"run", "test"} <= named <= targets


def test_the_makefile_and_the_constraints_agree_on_torch() -> None:
    version = re.search(r"^TORCH := (.+)$", MAKEFILE, re.MULTILINE)
    assert version
    assert f"\ntorch=={version[1]}\n" in (REPO / "constraints.txt").read_text()


def test_every_dependency_is_pinned() -> None:
    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~\[; ]", name, maxsplit=1)[0]).lower()

    project: dict[str, Any] = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    asked = {normal(d) for d in project["dependencies"]}
    asked |= {normal(d) for extra in project["optional-dependencies"].values() for d in extra}
    lines = (REPO / "constraints.txt").read_text().splitlines()
    pinned = {normal(line) for line in lines if line and not line.startswith("#")}
    # triton comes pinned exactly by torch's CUDA build; inferd is this project (extras that name others).
    assert asked - pinned == {"inferd", "triton"}
    assert all("==" in line for line in lines if line and not line.startswith("#"))


def options() -> Iterator[tuple[str, click.Option]]:
    for path, command in commands().items():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                yield " ".join(("inferd", *path)), parameter


def test_every_command_and_flag_says_what_it_is_for() -> None:
    silent = [f"{where} {option.opts[0]}" for where, option in options() if not option.help]
    silent += [" ".join(("inferd", *path)) for path, command in commands().items() if not command.help]
    assert not silent
