"""The README as the tests read it: its text, and the calls of programs that it speaks of."""

import re
import shlex

from tests.architecture.source import REPO

README = (REPO / "README.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```(?:sh|console|bash)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
INLINE = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL))
SPOKEN = [line.strip() for text in (*FENCES, *INLINE) for line in text.replace("\\\n", " ").splitlines()]


def spoken(program: str) -> list[list[str]]:
    """The README's calls of a program, as words, comments left out."""
    lines = (line.removeprefix("$ ").removeprefix(".venv/bin/") for line in SPOKEN)
    return [shlex.split(line, comments=True) for line in lines if line.split(" ")[0] == program]
