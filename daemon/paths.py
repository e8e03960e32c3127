"""Where the daemon keeps what: runtime directory (sockets), state directory (ring, lock), cache (models); and one
daemon per state.

systemd's variables first, then the XDG ones, then places of the user's own. Enter at `runtime_dir`, `state_dir`,
`cache_dir`, `lock`.
"""

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from engine.errors import ConfigError, InferdError


class AlreadyRunning(InferdError):
    """Another daemon uses this state directory or socket."""

    code = "already_running"
    exit_code = 6


class AddressInUse(InferdError):
    """A port is taken."""

    code = "address_in_use"
    exit_code = 7


def runtime_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """A private directory for sockets, made if need be. Raises ConfigError."""
    if given := environ.get("RUNTIME_DIRECTORY"):
        return _made(Path(given.split(":")[0]), private=False)
    base = environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir():
        return _made(Path(base) / "inferd")
    return _made(Path(tempfile.gettempdir()) / f"inferd-{os.getuid()}")


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where what outlives the daemon lies, made if need be. Raises ConfigError."""
    if given := environ.get("STATE_DIRECTORY"):
        return _made(Path(given.split(":")[0]), private=False)
    base = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME", "/")) / ".local" / "state"
    return _made(Path(base) / "inferd")


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where models lie, made if need be. Raises ConfigError."""
    if given := environ.get("CACHE_DIRECTORY"):
        return _made(Path(given.split(":")[0]), private=False)
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/")) / ".cache"
    return _made(Path(base) / "inferd", private=False)


def _made(path: Path, *, private: bool = True) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        raise ConfigError(f"cannot make the directory {path}: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode) or (private and (info.st_uid != os.getuid() or info.st_mode & 0o022)):
        raise ConfigError(f"{path} is not a directory of this user alone", "remove it or set RUNTIME_DIRECTORY")
    return path


@contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Hold `directory` for this process. Raises AlreadyRunning, naming the holder."""
    try:
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write in {directory}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            raise AlreadyRunning(
                f"another inferd (pid {holder}) uses {directory}", "stop it, or give this one its own STATE_DIRECTORY"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
