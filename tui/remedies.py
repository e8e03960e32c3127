"""Remedies: the commands that a finding's next step and its runbook offer, and running one.

A remedy is a line of a shell block in the runbook, or a whole next step, that begins with `inferd`. What other tools do
(systemctl, kubectl) is shown in the runbook and left to people: it may be meant for another machine. No shell is
involved. Enter at `commands` and `run`.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from typing import Final

from telemetry.events import Finding

_BLOCK: Final = re.compile(r"^```(?:sh|bash|console|shell)?[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE: Final = re.compile(r"`(inferd [^`\n]+)`")
_TIME_LIMIT_S: Final = 120.0


def commands(finding: Finding, markdown: str | None) -> list[str]:
    """Each once, the finding's own first. A command with a part to fill in (NAME, <pid>) is not offered."""
    found: list[str] = []
    own = [finding.next_step] if finding.next_step.startswith("inferd ") else _INLINE.findall(finding.next_step)
    block_lines = [row for block in _BLOCK.findall(markdown or "") for row in block.splitlines()]
    for row in (*own, *block_lines):
        command = row.strip().removeprefix("$ ").partition("  #")[0].strip()
        if (
            command.startswith("inferd ")
            and command not in found
            and not re.search(r"<\w|\b[A-Z][A-Z_]+\b|[|;&>$]", command)
        ):
            found.append(command)
    return found


def run(command: str, prefix: Sequence[str], socket: str = "") -> tuple[int, str]:
    """Run an `inferd …` command; its exit status and what it printed. `prefix` is how inferd is called here, `socket`
    the daemon that is watched: the command must not find another one."""
    words = [*prefix, *shlex.split(command)[1:]]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT_S,
            check=False,
            env={**os.environ, **({"INFERD_SOCKET": socket} if socket else {})},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()
