"""Whether the kernel killed something of ours for memory: the control group's own counter."""

from pathlib import Path


def oom_kills(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Processes of this control group that the kernel has killed for memory; 0 where no counter exists."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            files = (root / group.lstrip("/") / "memory.events", root / "memory.events")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            files = (base / group.lstrip("/") / "memory.oom_control", base / "memory.oom_control")
        else:
            continue
        for file in files:
            count = _counter(file)
            if count is not None:
                return count
    return 0


def _counter(file: Path) -> int | None:
    """The `oom_kill` line of memory.events (v2) or memory.oom_control (v1)."""
    try:
        words = (line.split() for line in file.read_text(encoding="ascii").splitlines())
        return next((int(line[1]) for line in words if line and line[0] == "oom_kill"), None)
    except OSError:
        return None
