"""The installation: what about this machine and these settings will hurt, looked at before or beside a daemon.

Owns the looks; each returns one Trouble or None and reads under `root` where the kernel is asked. It must not start,
write or import anything heavy: torch is known by its metadata. Enter at `troubles`.
"""

import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from runbooks.evidence import Trouble
from telemetry import probe

_LEAST_DISK_BYTES: Final = 1 << 30
# The oldest driver that runs a CUDA build of that major version (NVIDIA's compatibility table).
_LEAST_DRIVER: Final = {"11": 450, "12": 525, "13": 580}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a start from here would use. `running`: a daemon answers, so its port is taken rightly."""

    settings: Mapping[str, Any]  # name → value
    directories: Mapping[str, Path]  # what for → where
    running: bool = False
    root: Path = probe.ROOT
    torch_version: str | None = field(default_factory=lambda: _version("torch"))


def troubles(place: Place) -> tuple[Trouble, ...]:
    """Everything that was found; empty if all is well."""
    looks = (driver, compiler, disk, permissions, port, threads, huge_pages, memory_limit)
    return tuple(trouble for look in looks if (trouble := look(place)) is not None)


def driver(place: Place) -> Trouble | None:
    """torch's build against the NVIDIA driver."""
    version = _read(place.root / "proc/driver/nvidia/version")
    found = re.search(r"(?:Module|x86_64)\s+(\d+)\.", version)
    cuda = re.search(r"\+cu(\d\d)", place.torch_version or "")
    device = place.settings.get("device")
    if place.torch_version is None:
        return Trouble(what="driver", found="torch is not installed", do="make setup", severity="critical")
    if device == "cuda" and not version:
        return Trouble(
            what="driver",
            found="device is cuda, and no NVIDIA driver is loaded",
            do="load the driver, or set device to auto",
            severity="critical",
        )
    if version and "+cpu" in place.torch_version:
        return Trouble(
            what="driver",
            found=f"an NVIDIA driver is loaded, but torch {place.torch_version} is a CPU build",
            do="install inferd's cuda extra: the GPU is not used",
        )
    if found and cuda and int(found[1]) < _LEAST_DRIVER.get(cuda[1], 0):
        return Trouble(
            what="driver",
            found=f"driver {found[1]} is too old for torch {place.torch_version}",
            do=f"driver {_LEAST_DRIVER[cuda[1]]} or newer is needed",
            severity="critical",
        )
    return None


def compiler(place: Place) -> Trouble | None:
    """A C++ compiler: compiled kernels need one, once."""
    if any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return None
    return Trouble(what="compiler", found="there is no C++ compiler", do="apt-get install -y g++", severity="info")


def disk(place: Place) -> Trouble | None:
    """Room where inferd writes."""
    for what, directory in place.directories.items():
        if what == "runtime":
            continue  # sockets only
        existing = next((each for each in (directory, *directory.parents) if each.exists()), None)
        if existing is None:
            continue
        found = os.statvfs(existing)
        free = found.f_bavail * found.f_frsize
        if free < _LEAST_DISK_BYTES:
            return Trouble(
                what="disk",
                found=f"{free >> 20} MiB are free for the {what} directory {directory}",
                do="make room: inferd models list",
            )
    return None


def permissions(place: Place) -> Trouble | None:
    """Directories that exist and cannot be written, or that others can write."""
    for what, directory in place.directories.items():
        if not directory.exists():
            continue
        if not os.access(directory, os.W_OK | os.X_OK):
            return Trouble(
                what="permissions",
                found=f"the {what} directory {directory} cannot be written by uid {os.getuid()}",
                do=f"chown it, or set {what.upper()}_DIRECTORY",
                severity="critical",
            )
        if what != "cache" and directory.stat().st_mode & 0o002:
            return Trouble(
                what="permissions",
                found=f"everybody may write in the {what} directory {directory}",
                do=f"chmod 700 {directory}",
            )
    return None


def port(place: Place) -> Trouble | None:
    """The API's port is free, if no daemon of ours holds it."""
    wanted = place.settings.get("port")
    if place.running or not isinstance(wanted, int) or wanted == 0:
        return None
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((str(place.settings.get("host") or "127.0.0.1"), wanted))
        except OSError as error:
            return Trouble(
                what="port",
                found=f"port {wanted} cannot be taken: {error.strerror}",
                do=f"see who holds it (ss -ltnp sport = {wanted}), or choose another --port",
                severity="critical",
            )
    return None


def threads(place: Place) -> Trouble | None:
    """Compute threads against the cores, and the share of them, that this process may use."""
    cores, quota = len(os.sched_getaffinity(0)), _cpu_quota(place.root)
    wanted = place.settings.get("threads")
    usable = min(cores, quota) if quota else cores
    if isinstance(wanted, int) and wanted > usable:
        return Trouble(
            what="threads",
            found=f"{wanted} threads are set, and {usable:g} cores may be used",
            do=f"set threads to {max(1, int(usable))}",
        )
    if wanted is None and quota and quota < cores / 2:
        return Trouble(
            what="threads",
            found=f"{cores} cores are visible, but the CPU quota is {quota:g} of them",
            do=f"set threads to {max(1, int(quota))}: more of them only wait for each other",
        )
    return None


def huge_pages(place: Place) -> Trouble | None:
    """Transparent huge pages: large matrices in small pages cost time."""
    if "[never]" not in _read(place.root / "sys/kernel/mm/transparent_hugepage/enabled"):
        return None
    return Trouble(
        what="huge pages",
        found="transparent huge pages are switched off",
        do="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        severity="info",
    )


def memory_limit(place: Place) -> Trouble | None:
    """The limit that was set against what the unit, the pod or the machine grants."""
    wanted, granted = place.settings.get("memory_limit"), probe.memory_limit_bytes(place.root)
    if not isinstance(wanted, int) or granted is None or wanted <= granted:
        return None
    return Trouble(
        what="memory limit",
        found=f"memory_limit is {wanted >> 20} MiB, and the unit, pod or machine grants {granted >> 20} MiB",
        do=f"set memory_limit to {granted >> 20}MiB or less, or raise the other one",
        severity="critical",
    )


def _cpu_quota(root: Path) -> float | None:
    """Cores that cgroup v2 grants to us; None = no quota, or not reported."""
    path = next((line[3:] for line in _read(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    parts = [part for part in path.split("/") if part and part != ".."]
    quotas = []
    for depth in range(len(parts) + 1):
        fields = _read(root.joinpath("sys/fs/cgroup", *parts[:depth], "cpu.max")).split()
        if len(fields) == 2 and fields[0].isdigit() and int(fields[1]):
            quotas.append(int(fields[0]) / int(fields[1]))
    return min(quotas, default=None)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
