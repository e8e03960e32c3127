"""`make perf NAME=x`: measure tests/perf/x.py, keep the raw runs with the machine they ran on, render the ledger.

A perf script is a module with three names: `TITLE` (what is measured), `PROMISE` (what must hold, in words) and
`run(quick: bool) -> Findings`. `quick` asks for the smallest run that still goes through everything; its result is
printed and not kept. The harness owns the result's form; scripts own what they measure.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
RESULTS = HERE / "results"
_VERSIONS = ("torch", "transformers", "aiohttp", "tokenizers", "gguf")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a script found. `summary` maps a figure with its unit in the name to its value; `met` is whether the promise
    held, None if it makes none."""

    runs: list[dict[str, Any]]
    summary: dict[str, float | int | str]
    met: bool | None = None
    seeds: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def scripts() -> list[str]:
    """The names that can be measured: modules beside this one that define `run`."""
    return sorted(p.stem for p in HERE.glob("*.py") if re.search(r"^def run\(", p.read_text(), re.MULTILINE))


def machine() -> dict[str, Any]:
    """The facts of this machine that figures depend on; no name, no address."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    versions = {}
    for name in _VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_limit_bytes": memory_limit_bytes(),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "versions": versions,
    }


def memory_limit_bytes() -> int | None:
    """The container's limit, or None where there is none."""
    for name in _CGROUP_LIMITS:
        path = Path(name)
        if path.exists():
            text = path.read_text().strip()
            return int(text) if text.isdigit() and int(text) < 1 << 60 else None
    return None


def commit() -> str:
    """The commit measured, with a + if the working tree differs from it in anything but results."""
    head = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", ":!tests/perf/results", ":!tests/perf/LEDGER.md")
    return head + ("+" if changed else "")


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=REPO, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()


def measure(name: str, quick: bool) -> dict[str, Any]:
    """Run one script and put its findings on record. Raises ModuleNotFoundError for a name that is none."""
    script = importlib.import_module(f"tests.perf.{name}")
    began = time.time()
    load_before = os.getloadavg()[0]
    findings: Findings = script.run(quick)
    return {
        "name": name,
        "title": script.TITLE,
        "promise": script.PROMISE,
        "command": f"make perf NAME={name}" + (" ARGS=--quick" if quick else ""),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
        "took_s": round(time.time() - began, 1),
        "load_before": round(load_before, 2),
        "machine": machine(),
        **asdict(findings),
    }


def main() -> int:
    """Exit code 0 if the promise held (or none was made), 1 if not, 2 for a name that is none."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.perf.harness", description="Measure one thing and record it."
    )
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--quick", action="store_true", help="smallest run; print it, keep nothing")
    asked = parser.parse_args()
    if asked.name not in scripts():
        print(f"make perf NAME=x, where x is one of: {', '.join(scripts())}", file=sys.stderr)
        return 2
    result = measure(asked.name, asked.quick)
    width = max(map(len, result["summary"]), default=0) + 2
    for key, value in result["summary"].items():
        print(f"{key:<{width}}{value}")
    print(f"{result['promise']}: {'–' if result['met'] is None else 'yes' if result['met'] else 'NO'}")
    if not asked.quick:
        from tests.perf.render import write_ledger

        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{asked.name}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        write_ledger()
    return 1 if result["met"] is False else 0


if __name__ == "__main__":
    sys.exit(main())
