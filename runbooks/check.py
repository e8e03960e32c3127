"""Checks and the shelf of runbooks: NAME.py beside NAME.md, one pair a symptom.

Owns what a check is, how the pairs are found, and the order in which findings are told. It must not know any one
symptom. Enter at `examine`; adding a runbook is adding a pair.
"""

import importlib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from runbooks.evidence import Evidence
from telemetry.events import SEVERITIES, Finding

log = logging.getLogger("inferd.doctor")

_HOME: Final = Path(__file__).parent


class Check(Protocol):
    """A pure function of the evidence. None: nothing to say, also because what it needs is not reported."""

    def __call__(self, evidence: Evidence, /) -> Finding | None: ...


@dataclass(frozen=True, slots=True)
class Runbook:
    """One pair: the check and the Markdown."""

    name: str
    check: Check
    text: str

    def section(self, name: str) -> str | None:
        """The part of the text under the heading whose slug is `name`; None if there is no such one."""
        lines = self.text.splitlines()
        at = next((i for i, line in enumerate(lines) if line.startswith("#") and slug(line) == name), None)
        if at is None:
            return None
        depth = len(lines[at]) - len(lines[at].lstrip("#"))
        ends = (i for i in range(at + 1, len(lines)) if re.match(rf"#{{1,{depth}}} ", lines[i]))
        return "\n".join(lines[at : next(ends, len(lines))]).rstrip() + "\n"

    @property
    def sections(self) -> list[str]:
        """Slugs of the headings below the title, in order."""
        return [slug(line) for line in self.text.splitlines() if re.match(r"#{2,} ", line)]


def slug(heading: str) -> str:
    """How a heading is called on the command line: '## Whose bytes?' is `whose-bytes`."""
    return "-".join(re.findall(r"[a-z0-9]+", heading.lower()))


def names() -> list[str]:
    """Every runbook, by name."""
    return sorted(path.stem for path in _HOME.glob("*.md"))


def shelf() -> tuple[Runbook, ...]:
    """Every runbook with its check."""
    return tuple(Runbook(name, importlib.import_module(f"runbooks.{name}").check, text(name)) for name in names())


def text(name: str) -> str:
    """A runbook's Markdown. Raises KeyError for one that does not exist."""
    if name not in names():
        raise KeyError(name)
    return (_HOME / f"{name}.md").read_text(encoding="utf-8")


def finding(
    evidence: Evidence,
    runbook: str,
    severity: str,
    summary: str,
    *,
    next_step: str,
    section: str = "",
    confidence: float = 1.0,
    explains: Sequence[str] = (),
    **measured: str,
) -> Finding:
    """A finding at the evidence's instant; `measured` are its lines of evidence, by what they are about."""
    return Finding(
        at_ns=evidence.at_ns,
        runbook=runbook,
        severity=severity,
        summary=summary,
        evidence={name.replace("_", " "): value for name, value in measured.items()},
        next_step=next_step,
        section=section,
        confidence=confidence,
        explains=tuple(explains),
    )


def examine(evidence: Evidence, books: Iterable[Runbook] | None = None) -> list[Finding]:
    """Every check, the findings in the order in which to read them. A check that fails says so, and hides no other."""
    found = []
    for book in shelf() if books is None else books:
        try:
            seen = book.check(evidence)
        except Exception as error:
            log.exception("the check of %s failed", book.name)
            seen = finding(
                evidence,
                book.name,
                "info",
                f"the check of {book.name} failed: {type(error).__name__}: {error}",
                next_step="report it, with a bundle: inferd doctor --bundle",
                confidence=0.0,
            )
        if seen is not None:
            found.append(seen)
    return ranked(found)


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Worst harm first; a cause inherits the harm of what it explains, and what follows from it is told right after."""
    present = {each.runbook: each for each in findings}
    follows = {name: [other for other in each.explains if other in present] for name, each in present.items()}
    told: dict[str, Finding] = {}

    def harm(name: str, path: frozenset[str] = frozenset()) -> int:
        others = (harm(other, path | {name}) for other in follows[name] if other not in path)
        return max([SEVERITIES.index(present[name].severity), *others])

    def tell(some: Iterable[str]) -> None:
        for name in sorted(some, key=lambda name: (-harm(name), -present[name].confidence, name)):
            if name not in told:
                told[name] = present[name]
                tell(follows[name])

    tell(set(present) - {other for others in follows.values() for other in others})
    tell(present)  # none is lost, should two explain each other
    return list(told.values())
