"""Library: the models on this machine: what a name means, fetching it, preparing it, listing, removing.

On disk, under the cache directory:
    sources/NAME/FILE.gguf     fetched models of the catalogue (a hub's models lie in the hub's own cache)
    prepared/KEY/              what `engine.prepare` wrote: KEY names the content (engine/source.py)
    names/REFERENCE            a link to a prepared directory: one for each name, and for each path in its present state
    locks/                     one file for each thing that is being made
A name whose link stands is answered without network and without reading the model. Whatever is made appears at once
(rename) and under a lock, so that it may be interrupted anywhere and be asked for by several processes.
It must not import torch: preparing happens in a process of its own. Enter at `Library`.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from daemon import hub
from daemon.fetch import Report
from daemon.paths import cache_dir
from daemon.progress import Progress
from daemon.wheels import CATALOGUE, PipSettings, WheelModel, pull
from engine import errors
from engine.errors import ConfigError, InferdError, ModelError
from engine.manifest import Manifest
from engine.source import Source

_HOME = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that can be served now: `name` is what clients call it, `directory` holds its manifest."""

    name: str
    directory: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of `inferd models list`. `state`: prepared | fetched (not prepared yet) | available (not fetched)."""

    name: str
    state: str
    about: str
    source: str = ""
    directory: str = ""
    family: str = ""
    parameters: int = 0
    disk_bytes: int = 0  # what `rm` would give back


@dataclass(frozen=True, slots=True)
class _Reference:
    """What was asked for: a model of the catalogue, a path, or a hub id."""

    asked: str
    catalogue: WheelModel | None = None
    path: Path | None = None

    @property
    def served_name(self) -> str:
        if self.path is None:
            return self.asked
        return self.path.stem if self.path.suffix == ".gguf" else self.path.name


class Library:
    """The models under `root`. `report` is told what is going on, and how much of it is done (0–1)."""

    def __init__(
        self,
        root: Path,
        report: Report,
        *,
        catalogue: Mapping[str, WheelModel] = CATALOGUE,
        pip: Callable[[], PipSettings] = PipSettings.read,
    ) -> None:
        self.root = root
        self._report = report
        self._catalogue = catalogue
        self._pip = pip
        self._sources, self._prepared, self._names = root / "sources", root / "prepared", root / "names"

    def find(self, name: str) -> Prepared | None:
        """The prepared model of this name, or None; no network. Raises ConfigError for a name that means nothing."""
        reference = self._reference(name)
        if reference.path is not None and (reference.path / "manifest.json").is_file():  # prepared by hand
            return Prepared(reference.served_name, reference.path, Manifest.load(reference.path))
        return self._linked(reference, self._link(reference))

    def prepare(self, name: str) -> Prepared:
        """The model, ready to be served; fetched and prepared first where that was not done. Raises ModelError and its
        kin, ConfigError."""
        if found := self.find(name):
            return found
        reference = self._reference(name)
        source = Source.at(self._fetched(reference))
        digest = reference.catalogue.sha256 if reference.catalogue else source.digest(self._report)
        target = self._prepared / source.key(digest)
        with self._locked(target.name):
            if not _usable(target):
                shutil.rmtree(target, ignore_errors=True)
                self._run_prepare(source, target, reference.served_name, digest)
            self._name(self._link(reference), target)
            return Prepared(reference.served_name, target, Manifest.load(target))

    def pull(self, name: str) -> Path:
        """The model's files, fetched if they are not here. Of a hub's model, the newest revision. Raises ModelError."""
        reference = self._reference(name)
        if reference.catalogue is None and reference.path is None:
            self._link(reference).unlink(missing_ok=True)  # another revision may come
        return self._fetched(reference)

    def entries(self) -> list[Entry]:
        """Everything here, and what the catalogue could add."""
        names = self._names_by_key()
        found = [self._entry(directory, names.get(directory.name, [])) for directory in _subdirectories(self._prepared)]
        listed = {name for of_key in names.values() for name in of_key}
        for model in self._catalogue.values():
            if model.name not in listed:
                source = self._sources / model.name / model.file_name
                state, disk = ("fetched", source.stat().st_size) if source.is_file() else ("available", 0)
                found.append(Entry(name=model.name, state=state, about=model.about, disk_bytes=disk))
        return sorted(found, key=lambda entry: entry.name)

    def remove(self, name: str) -> int:
        """Forget a model: its prepared directory and, if the library fetched it, its source. A path's own files stay.
        Returns the bytes given back. Raises ConfigError if there is nothing of this name."""
        names, freed, hit = self._names_by_key(), 0, False
        source = self._sources / name
        for directory in _subdirectories(self._prepared):
            called = {*names.get(directory.name, []), directory.name, self._source_of(directory)}
            if not called & {name, str(Path(name).expanduser().absolute())}:
                continue
            hit = True
            with self._locked(directory.name):
                for link in self._names.iterdir():
                    if link.is_symlink() and link.readlink().name == directory.name:
                        link.unlink()
                freed += _discard(directory)
        if name in self._catalogue and source.is_dir():
            hit = True
            freed += _discard(source)
        if not hit:
            raise ConfigError(f"there is no model {name!r} here", "`inferd models list` shows them")
        return freed

    def _reference(self, name: str) -> _Reference:
        if name in self._catalogue:
            return _Reference(name, catalogue=self._catalogue[name])
        path = Path(name).expanduser()
        if (name and path.exists()) or path.is_absolute() or name.startswith(".") or name.endswith(".gguf"):
            return _Reference(name, path=path.absolute())
        if hub.is_id(name):
            return _Reference(name)
        close = get_close_matches(name, self._catalogue, n=1)
        raise ConfigError(
            f"there is no model {name!r}" + (f", did you mean {close[0]!r}?" if close else ""),
            f"give one of {', '.join(self._catalogue)}, a path to a .gguf file or directory, or a hub id (org/name)",
        )

    def _link(self, reference: _Reference) -> Path:
        """Where the prepared directory of this reference is noted; for a path, of the path's present state."""
        if reference.path is None:
            return self._names / reference.asked.replace("/", "--")
        return self._names / f"path-{Source.at(reference.path).fingerprint()[:32]}"

    def _linked(self, reference: _Reference, link: Path) -> Prepared | None:
        directory = self._prepared / link.readlink().name if link.is_symlink() else None
        if directory is None or not _usable(directory):
            return None
        return Prepared(reference.served_name, directory, Manifest.load(directory))

    def _fetched(self, reference: _Reference) -> Path:
        if reference.path is not None:
            return reference.path
        model = reference.catalogue
        if model is None:
            self._report(f"fetch {reference.asked} from the hub", 0.0)
            return hub.snapshot(reference.asked)
        target = self._sources / model.name / model.file_name
        with self._locked(model.name):
            if not target.is_file():
                pull(model, target, self._report, self._pip)
        return target

    def _name(self, link: Path, target: Path) -> None:
        link.parent.mkdir(parents=True, exist_ok=True)
        fresh = link.with_name(f".{link.name}.new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(Path("..") / "prepared" / target.name)
        fresh.replace(link)

    def _run_prepare(self, source: Source, target: Path, name: str, digest: str) -> None:
        """`python -m engine.prepare`, its progress told on. Raises the error that it names."""
        for left in self._prepared.glob(f".{target.name}-*"):  # by one that was killed: we hold the lock
            shutil.rmtree(left, ignore_errors=True)
        path = os.pathsep.join(filter(None, (str(_HOME), os.environ.get("PYTHONPATH"))))
        words = [sys.executable, "-P", "-m", "engine.prepare", str(source.path), str(target), name, digest]
        last: dict[str, Any] = {}
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        ) as child:
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    last = json.loads(line)
                    if "stage" in last:
                        self._report(f"prepare {last['stage']}", float(last["share"]))
            except BaseException:
                child.terminate()
                raise
        if child.returncode:
            raise _error(last, child.returncode)

    @contextmanager
    def _locked(self, what: str) -> Iterator[None]:
        """Alone on this machine with `what`."""
        try:
            (self.root / "locks").mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root / "locks" / what, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot write in {self.root}: {error.strerror}", "set XDG_CACHE_HOME") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._report("wait for another inferd that fetches or prepares this model", 0.0)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _names_by_key(self) -> dict[str, list[str]]:
        """Catalogue names and hub ids by the prepared directory that they mean."""
        found: dict[str, list[str]] = {}
        for link in sorted(self._names.iterdir()) if self._names.is_dir() else ():
            if link.is_symlink() and not link.name.startswith((".", "path-")):
                found.setdefault(link.readlink().name, []).append(link.name.replace("--", "/"))
        return found

    def _entry(self, directory: Path, names: list[str]) -> Entry:
        disk = _size(directory) + sum(_size(self._sources / name) for name in names if name in self._catalogue)
        try:
            manifest = Manifest.load(directory)
        except ModelError as error:
            return Entry(name=directory.name, state="damaged", about=error.message, disk_bytes=disk)
        return Entry(
            name=names[0] if names else manifest.source,
            state="prepared",
            about=f"{manifest.spec.family}, {manifest.parameters / 1e6:.0f} M parameters",
            source=manifest.source,
            directory=str(directory),
            family=manifest.spec.family,
            parameters=manifest.parameters,
            disk_bytes=disk,
        )

    def _source_of(self, directory: Path) -> str:
        try:
            return Manifest.load(directory).source
        except ModelError:
            return ""


def gguf_path(name: str) -> Path:
    """The GGUF file of a model of the catalogue, fetched first if need be, with progress on standard
    error. Raises ModelError and its kin."""
    progress = Progress()
    try:
        return Library(cache_dir(), progress).pull(name)
    finally:
        progress.done()


def _usable(directory: Path) -> bool:
    """Whether a prepared directory is there with all that its manifest names."""
    try:
        manifest = Manifest.load(directory)
    except ModelError:
        return False
    return all(path.is_file() for path in (*manifest.weight_paths(directory), directory / "tokenizer.json"))


def _error(last: dict[str, Any], exit_code: int) -> InferdError:
    """The error that the child said in its last line, of the class that it named."""
    if "error" not in last:
        return ModelError(f"preparing ended with exit code {exit_code}", "was it killed for its memory?")
    kind = getattr(errors, str(last.get("kind")), ModelError)
    made = kind if isinstance(kind, type) and issubclass(kind, InferdError) else ModelError
    return made(str(last["error"]), str(last.get("hint", "")))


def _subdirectories(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")) if path.is_dir() else []


def _size(path: Path) -> int:
    """Bytes on disk of a directory's files."""
    return sum(p.stat().st_blocks * 512 for p in path.rglob("*") if p.is_file()) if path.is_dir() else 0


def _discard(directory: Path) -> int:
    """Remove a directory so that it is gone at once, not file by file. Returns the bytes given back."""
    freed = _size(directory)
    doomed = directory.with_name(f".gone-{directory.name}-{os.getpid()}")
    directory.rename(doomed)
    shutil.rmtree(doomed)
    return freed
