"""The probe: what the machine says about memory, measured, never booked.

Owns reading /proc and the cgroup files (v2, v1 or none), always under a `root` that tests replace. 'Not available' is a
value (None), because it is the truth on many machines. Enter at any of the functions; none keeps anything open.
"""

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path("/")
# cgroup v1 writes 'no limit' as the largest page-aligned number, which depends on the page size.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A process's resident memory: all = anonymous + file-backed + shared (shmem)."""

    total_bytes: int
    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The machine's memory. `available_bytes` is the kernel's estimate of what can be had without swapping."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroup:
    """The memory controller that governs a process. `version` 0 means none was found.

    `limit_bytes` is the least limit from its group up to the root of what can be seen; None = no limit. `oom_kills`
    counts processes killed in the group by its limit, `pressure_us` is (some, full) stall time, where the kernel tells.
    `cache_bytes` of the usage are pages of files, which the kernel takes back before it kills.
    """

    version: int
    limit_bytes: int | None = None
    usage_bytes: int | None = None
    cache_bytes: int | None = None
    oom_kills: int | None = None
    pressure_us: tuple[int, int] | None = None


def resident_bytes(pid: int | None = None, root: Path = ROOT) -> int | None:
    """Resident memory of a process (our own by default), cheaply; None if it is gone or cannot be seen."""
    text = _read(_proc(pid, root) / "statm")
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") if text else None


def resident(pid: int | None = None, root: Path = ROOT) -> Resident | None:
    """Resident memory of a process by kind; None if it is gone or the kernel does not say."""
    found = _keyed(_read(_proc(pid, root) / "status"), unit=1024)
    try:
        return Resident(
            total_bytes=found["VmRSS"],
            anonymous_bytes=found["RssAnon"],
            file_bytes=found["RssFile"],
            shared_bytes=found["RssShmem"],
        )
    except KeyError:
        return None


def high_water_bytes(*, reset: bool = False, root: Path = ROOT) -> int | None:
    """The most that our process had resident since the mark was last set back. `reset` sets it back to what is resident
    now, and that is returned; None where the kernel does neither."""
    if reset:
        try:
            (_proc(None, root) / "clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return None
    return _keyed(_read(_proc(None, root) / "status"), unit=1024).get("VmHWM")


def maps_files_under(directory: Path, pid: int | None = None, root: Path = ROOT) -> bool:
    """Whether a process maps any file under `directory`: cheap beside `mapping_bytes`."""
    return f" {directory}/" in (_read(_proc(pid, root) / "maps") or "")


def mapping_bytes(name: str, pid: int | None = None, root: Path = ROOT) -> int | None:
    """Resident bytes of the mappings called `name` in smaps (a path, or '[anon:…]'; one that ends in '/' means all
    files under it); None if there is no such one."""
    text = _read(_proc(pid, root) / "smaps")
    found: int | None = None
    inside = False
    for line in (text or "").splitlines():
        head = line.split(maxsplit=5)
        if head and "-" in head[0] and not head[0].endswith(":"):
            inside = len(head) == 6 and (head[5].startswith(name) if name.endswith("/") else head[5] == name)
        elif inside and line.startswith("Rss:"):
            found = (found or 0) + int(line.split()[1]) * 1024
    return found


def largest_mappings(most: int, pid: int | None = None, root: Path = ROOT) -> dict[str, int]:
    """Resident bytes of a process's mappings by name, summed, the `most` largest; nameless ones are '[anon]'. Reads
    smaps, which takes milliseconds: for somebody who asks, not for a beat."""
    found: dict[str, int] = {}
    name = ""
    for line in (_read(_proc(pid, root) / "smaps") or "").splitlines():
        head = line.split(maxsplit=5)
        if head and "-" in head[0] and not head[0].endswith(":"):
            name = head[5] if len(head) == 6 else "[anon]"
        elif line.startswith("Rss:"):
            found[name] = found.get(name, 0) + int(line.split()[1]) * 1024
    largest = sorted(found.items(), key=lambda item: -item[1])[:most]
    return {name: size for name, size in largest if size}


def cuda_segments(most: int) -> list[dict[str, Any]] | None:
    """Torch's own snapshot of its CUDA allocator: the `most` largest segments with their blocks. None in a process
    that has not used CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    kept = ("device", "total_size", "allocated_size", "active_size", "segment_type")
    segments = sorted(torch.cuda.memory_snapshot(), key=lambda segment: -segment["total_size"])[:most]
    return [
        {
            **{name: segment[name] for name in kept if name in segment},
            "blocks": [{"size": block["size"], "state": block["state"]} for block in segment["blocks"]],
        }
        for segment in segments
    ]


def cpu_seconds(pid: int | None = None, root: Path = ROOT) -> float | None:
    """User and system time that a process has used; None if it is gone."""
    text = _read(_proc(pid, root) / "stat")
    if not text:
        return None
    fields = text.rpartition(")")[2].split()  # the name, in parentheses, may hold anything
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def host_memory(root: Path = ROOT) -> HostMemory | None:
    """The machine's memory, or None where there is no /proc/meminfo."""
    found = _keyed(_read(root / "proc/meminfo"), unit=1024)
    if "MemTotal" not in found:
        return None
    return HostMemory(total_bytes=found["MemTotal"], available_bytes=found.get("MemAvailable", found.get("MemFree", 0)))


def cgroup(pid: int | None = None, root: Path = ROOT) -> Cgroup:
    """The memory cgroup of a process (our own by default)."""
    paths = {}
    for line in (_read(_proc(pid, root) / "cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths["v2" if number == "0" and not controllers else controllers] = path
    v1 = next((path for name, path in paths.items() if "memory" in name.split(",")), None)
    if v1 is not None:
        return _cgroup_v1(root / "sys/fs/cgroup/memory", v1)
    if "v2" in paths:
        return _cgroup_v2(root / "sys/fs/cgroup", paths["v2"])
    return Cgroup(version=0)


def boot_id(root: Path = ROOT) -> str:
    """Which boot of the machine this is; empty where the kernel does not say."""
    return (_read(root / "proc/sys/kernel/random/boot_id") or "").strip()


def pressure_us(root: Path = ROOT) -> tuple[int, int] | None:
    """How long (some, full) tasks were stalled for memory: in our cgroup, else on the machine; None without PSI."""
    return cgroup(root=root).pressure_us or _pressure(root / "proc/pressure/memory")


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """The least of the machine's memory and the cgroup's limit; None if neither is known."""
    host, limit = host_memory(root), cgroup(root=root).limit_bytes
    known = [value for value in (host.total_bytes if host else None, limit) if value is not None]
    return min(known, default=None)


def virtual_bytes() -> int:
    """Address space that this process has mapped."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")


def nearest_limit() -> tuple[str, int | None, int | None]:
    """(scope, limit, free) of the limit on this process that leaves least; scopes are evidence.SCOPES. ('', None, None)
    where nothing is known."""
    found: list[tuple[int, str, int]] = []
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        found.append((max(0, soft - virtual_bytes()), "address_space", soft))
    group = cgroup()
    if group.limit_bytes is not None and group.usage_bytes is not None:
        found.append((max(0, group.limit_bytes - group.usage_bytes), "cgroup", group.limit_bytes))
    host = host_memory()
    if host is not None:
        found.append((host.available_bytes, "host", host.total_bytes))
    if not found:
        return "", None, None
    free, scope, limit = min(found)
    return scope, limit, free


def _cgroup_v2(mount: Path, path: str) -> Cgroup:
    groups = [group for group in _up(mount, path) if (group / "memory.current").exists()]
    if not groups:
        return Cgroup(version=2 if (mount / "cgroup.controllers").exists() else 0)
    own = groups[0]
    limits = [_number(group / "memory.max") for group in groups]
    return Cgroup(
        version=2,
        limit_bytes=min((limit for limit in limits if limit is not None), default=None),
        usage_bytes=_number(own / "memory.current"),
        cache_bytes=_cache(own, "inactive_file", "active_file"),
        oom_kills=_keyed(_read(own / "memory.events")).get("oom_kill"),
        pressure_us=_pressure(own / "memory.pressure"),
    )


def _cgroup_v1(mount: Path, path: str) -> Cgroup:
    groups = [group for group in _up(mount, path) if (group / "memory.limit_in_bytes").exists()]
    if not groups:
        return Cgroup(version=0)
    own = groups[0]
    limits = [_number(group / "memory.limit_in_bytes") for group in groups]
    limits.append(_keyed(_read(own / "memory.stat")).get("hierarchical_memory_limit"))
    return Cgroup(
        version=1,
        limit_bytes=min((limit for limit in limits if limit is not None and limit < _NO_LIMIT_BYTES), default=None),
        usage_bytes=_number(own / "memory.usage_in_bytes"),
        cache_bytes=_cache(own, "total_inactive_file", "total_active_file"),
        oom_kills=_keyed(_read(own / "memory.oom_control")).get("oom_kill"),
    )


def _cache(group: Path, *names: str) -> int | None:
    found = _keyed(_read(group / "memory.stat"))
    return sum(found[name] for name in names) if all(name in found for name in names) else None


def _up(mount: Path, path: str) -> list[Path]:
    """The group and its ancestors below `mount`, innermost first. In a container the path may be the host's: the parts
    that do not exist here are skipped by the caller."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _pressure(path: Path) -> tuple[int, int] | None:
    totals = {}
    for line in (_read(path) or "").splitlines():
        kind, *fields = line.split()
        totals[kind] = next((int(field[6:]) for field in fields if field.startswith("total=")), 0)
    return (totals["some"], totals.get("full", 0)) if "some" in totals else None


def _proc(pid: int | None, root: Path) -> Path:
    return root / "proc" / ("self" if pid is None else str(pid))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None  # 'max' is no limit


def _keyed(text: str | None, unit: int = 1) -> dict[str, int]:
    """Lines of `key value` or `key: value kB`, the values times `unit`."""
    found = {}
    for line in (text or "").splitlines():
        fields = line.replace(":", " ").split()
        if len(fields) >= 2 and fields[1].isdigit():
            found[fields[0]] = int(fields[1]) * unit
    return found
