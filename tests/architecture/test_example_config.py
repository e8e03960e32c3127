"""inferd.example.toml is complete and true: every setting once, with its default, in a form that is accepted."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

from daemon.settings import NAMES, Settings, load
from tests.architecture.source import REPO

TEXT = (REPO / "inferd.example.toml").read_text(encoding="utf-8")
UNCOMMENTED = re.sub(r"^# (?=[a-z_]+ = )", "", TEXT, flags=re.MULTILINE)


def test_it_names_every_setting_once_and_no_other() -> None:
    assert sorted(tomllib.loads(UNCOMMENTED)) == sorted(NAMES)


def test_as_it_is_it_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TEXT)
    assert load(config=str(tmp_path / "a.toml"), environ={}).settings == Settings()


def test_what_it_shows_is_the_default_or_an_accepted_value(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(UNCOMMENTED)
    shown = load(config=str(tmp_path / "a.toml"), environ={}).settings
    wrong = {
        f.name: getattr(shown, f.name)
        for f in fields(Settings)
        if f.default is not None and getattr(shown, f.name) != f.default
    }
    assert not wrong
    lines = {line.split()[1]: line for line in TEXT.splitlines() if re.match(r"# [a-z_]+ = ", line)}
    undecided = {f.name for f in fields(Settings) if f.default is None}
    assert {name for name, line in lines.items() if "no default" in line} == undecided
