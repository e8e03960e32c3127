"""The wheel: what is in it, and that it runs in an environment of its own, away from the checkout."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGES, REPO, sources


def run(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(w) for w in words], cwd=cwd, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the files git knows, so that nothing lying about gets in."""
    copy = tmp_path_factory.mktemp("source")
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=REPO).splitlines():
        if (REPO / name).is_file():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPO / name, target)
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ".", cwd=copy)
    (built,) = out.glob("inferd-*.whl")
    return built


def test_it_holds_every_module_and_no_test(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {s.path for s in sources()} <= names
    top = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert top == set(PACKAGES)


def test_it_holds_the_data_that_code_reads(wheel: Path) -> None:
    """Whatever git knows in our packages that is not Python, but for prose about a folder and tests of rules."""
    names = set(zipfile.ZipFile(wheel).namelist())
    known = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *PACKAGES, cwd=REPO).splitlines()
    data = {n for n in known if not n.endswith(".py") and Path(n).name != "README.md" and "rule_tests" not in n}
    assert not sorted(data - names), "list these under [tool.setuptools.package-data]"


def test_it_runs_installed_and_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment that borrows this one's libraries, the command is there and runs the installed code."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    away = tmp_path / "away"
    away.mkdir()
    assert run(tmp_path / "venv" / "bin" / "inferd", "--version", cwd=away).strip().endswith("0.1.0")
    origin = run(python, "-c", "import daemon; print(daemon.__file__)", cwd=away).strip()
    assert Path(origin).is_relative_to(site)
    assert "bench" in run(tmp_path / "venv" / "bin" / "inferd", "--help", cwd=away)
