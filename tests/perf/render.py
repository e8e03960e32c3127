"""The ledger: tests/perf/LEDGER.md rendered from the results beside it. `python -m tests.perf.render` writes it again.

Pure but for `write_ledger`. A figure in the ledger that no result has, or the other way round, fails a test.
"""

import json
from typing import Any

from tests.perf.harness import HERE, RESULTS

LEDGER = HERE / "LEDGER.md"
_HEAD = """# The performance ledger

Rendered from tests/perf/results by `python -m tests.perf.render`: do not edit. Measured anew by `make perf NAME=…`.
A commit with a + had local changes. `load` is the machine's load average before the measurement began: above about 0.5
its figures were taken in company.
"""


def results() -> list[dict[str, Any]]:
    """Every recorded result, by name."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def render(recorded: list[dict[str, Any]]) -> str:
    """The whole ledger as Markdown."""
    rows = ["| measured | promise | held | commit | date |", "|---|---|---|---|---|"]
    rows += [
        f"| [{r['title']}](#{r['name']}) | {r['promise']} | {_held(r['met'])} | {r['commit']} | {r['date']} |"
        for r in recorded
    ]
    return "\n".join([_HEAD, *rows, "", *(_section(r) for r in recorded)])


def _held(met: bool | None) -> str:
    return "–" if met is None else "yes" if met else "**no**"


def _section(result: dict[str, Any]) -> str:
    machine = result["machine"]
    limit = machine["memory_limit_bytes"] or machine["memory_bytes"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"## {result['name']}",
        "",
        f"{result['title']}. Promise: {result['promise']}. Held: {_held(result['met'])}.",
        "",
        "| figure | value |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in result["summary"].items()),
        "",
        f"`{result['command']}` · {len(result['runs'])} raw runs · seeds {result['seeds'] or 'none'} ·"
        f" took {result['took_s']} s · load {result['load_before']}",
        f"{machine['cpu']}, {machine['cores']} cores, {limit / 2**30:.0f} GiB, Linux {machine['kernel']},"
        f" Python {machine['python']}, {versions}",
        *(f"\n- {note}" for note in result["notes"]),
        "",
    ]
    return "\n".join(lines)


def write_ledger() -> None:
    """Bring LEDGER.md in step with the results."""
    LEDGER.write_text(render(results()))


if __name__ == "__main__":
    write_ledger()
