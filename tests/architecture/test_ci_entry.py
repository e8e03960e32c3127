""".ci/run's verdict, with a `make` that says what the suite would say."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.architecture.source import REPO


@pytest.mark.parametrize(
    ("output", "make_exit", "ci_exit"),
    [
        ("==== 12 passed in 3.21s ====", 0, 0),
        ("==== 12 passed, 2 deselected in 3.21s ====", 0, 0),
        ("==== 1 failed, 11 passed in 3.21s ====", 1, 1),
        ("SKIPPED [1] tests/x.py:3: no reason\n==== 11 passed, 1 skipped in 3.21s ====", 0, 1),
        ("==== no tests ran in 0.01s ====", 2, 2),
        ("ruff is unhappy", 2, 2),
        ("nothing to do", 0, 1),
    ],
    ids=["passed", "deselected", "failed", "skipped", "none", "lint", "silent"],
)
def test_it_fails_for_a_failure_a_skip_and_a_suite_that_did_not_run(
    tmp_path: Path, output: str, make_exit: int, ci_exit: int
) -> None:
    ci, tools = tmp_path / "checkout" / ".ci", tmp_path / "tools"
    ci.mkdir(parents=True)
    tools.mkdir()
    shutil.copy(REPO / ".ci" / "run", ci / "run")
    (ci / "packages.txt").write_text("# none\n")
    (tmp_path / "said").write_text(output + "\n")
    make = tools / "make"
    make.write_text(f"#!/bin/sh\n[ \"$1\" = test ] || exit 99\ncat '{tmp_path}/said'\nexit {make_exit}\n")
    make.chmod(0o755)
    done = subprocess.run(
        [ci / "run"], env={"PATH": f"{tools}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == ci_exit, done.stdout + done.stderr
    if "====" in output:
        assert done.stdout.splitlines()[-1] == output.splitlines()[-1]
    if "SKIPPED" in output:
        assert "SKIPPED [1] tests/x.py:3" in done.stderr
