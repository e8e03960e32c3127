"""The compiled kernels' library: built once for this machine from kernels/cpp/, kept in the cache, loaded by name.

Owns the compiler's command and where its result lies. Stdlib only. It must not know what the functions do. Enter at
`library`; `missing` says without building why there would be none.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

_SOURCES = Path(__file__).parent / "kernels" / "cpp"
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
_NEEDED = ("avx2", "fma", "f16c")
_TIMEOUT_S = 300


class CannotCompile(Exception):
    """There are no compiled kernels on this machine; the text says why, for people."""


def missing(cpu_flags: frozenset[str]) -> str:
    """Why there can be no compiled kernels here; empty if there can. `cpu_flags` as in /proc/cpuinfo."""
    lacking = [flag for flag in _NEEDED if flag not in cpu_flags]
    if lacking:
        return f"this CPU has no {lacking[0]}"
    if _compiler() is None:
        return "there is no C++ compiler (install g++ for several times the speed)"
    return ""


def library(cache_dir: Path, cpu_flags: frozenset[str], compiling: Callable[[], None] = lambda: None) -> Path:
    """The shared library, compiled first if this machine has none of these sources yet: some seconds, so `compiling`
    is called before. Raises CannotCompile."""
    compiler = _compiler()
    why = missing(cpu_flags)
    if why or compiler is None:
        raise CannotCompile(why)
    target = cache_dir / "kernels" / f"{_digest(compiler, cpu_flags)}.so"
    if target.exists():
        return target
    compiling()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            command = [compiler, *_FLAGS, "-o", str(made), str(_SOURCES / "api.cpp")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            if done.returncode:
                said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
                raise CannotCompile(f"{compiler} failed: {said.strip()}")
            made.rename(target)  # at once, so that two engines may build at the same time
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"the kernels could not be compiled: {error}") from error
    return target


def _compiler() -> str | None:
    asked = os.environ.get("CXX")
    return shutil.which(asked) if asked else shutil.which("g++") or shutil.which("c++")


def _digest(compiler: str, cpu_flags: frozenset[str]) -> str:
    """Of everything that the result depends on: sources, flags, compiler, and the processor that `native` means."""
    digest = hashlib.sha256()
    stat = Path(compiler).stat()
    for part in (*_FLAGS, os.path.realpath(compiler), str(stat.st_size), str(stat.st_mtime_ns), *sorted(cpu_flags)):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:32]
