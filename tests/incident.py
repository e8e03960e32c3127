"""The incident that README tells: `python -m tests.incident` plants an out-of-memory in a scratch daemon, looks at it
as somebody on call would, does what the runbook says, plants the same again, and writes docs/incident.md.

tests/daemon/test_incident.py plays it too, and compares. Enter at `play`.
"""

import asyncio
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from daemon.gameday import model
from daemon.gameday.rules import scraped, total
from daemon.gameday.scratch import Scratch
from telemetry.client import Endpoint
from tests.served import INFERD, ROOT, wait_for
from tests.tui.driving import picture, text_of
from tui.app import Top
from tui.feed import LiveFeed

DOCS: Final = ROOT / "docs"
PAGE: Final = DOCS / "incident.md"
CAP_BYTES: Final = 300_000  # that a step may hold: enough for one row of this model, not for three
SIZE: Final = (100, 30)
_PATIENCE_S: Final = 120
REMEDY: Final = ("doctor", "do", "set", "max_num_seqs=1")
PROOF_SECONDS: Final = 15

TEXT = """# An incident, from the page to the proof

Made by `python -m tests.incident` on a scratch daemon with a tiny model: a cap on what a step may hold is planted,
under load. The same is played and compared in the tests, so that this stays true.

**At night** requests fail with `out_of_memory`. Over SSH, `inferd top`, screen 7:

![inferd top: the finding, with its runbook beside it](incident-top.svg)

**What is it?** `inferd doctor` says it in words, with the evidence and the next step:

```
$ inferd doctor
{doctor}
```

**What does one do?** It is the runbook's section `{section}`:

```
$ inferd {runbook}
{section_text}
```

**The remedy**, one command, without a restart:

```
$ inferd {remedy}
{done}
```

**The proof:** the same cap is planted again, under the same load, and memory does not run out: no `oom` is younger than
the remedy. What is left is its price, which the doctor names too, until the limit on memory is raised in the morning:

```
$ inferd doctor --since {proof_seconds}
{proof}
```

![inferd top after the remedy](incident-after.svg)

The bundle of the out-of-memory, with the bytes and whose they were, lies in the state directory for the morning.
"""


@dataclass(frozen=True, slots=True)
class Story:
    """What was seen, in order; `before` and `after` are pictures (SVG), `ooms` how many there were in all."""

    before: str
    doctor: str
    runbook: str
    done: str
    proof: str
    proof_code: int
    after: str
    ooms: int


def play(directory: Path) -> Story:
    """The incident. Raises AssertionError if something does not come."""
    scratch = Scratch(directory, str(model.write(directory / "model")), ["capacity"])
    try:
        scratch.start()
        with scratch.busy():
            _run_out(scratch)
            wait_for(lambda: _found(scratch), _PATIENCE_S, "the daemon's own finding")
            before = asyncio.run(seen(scratch, "7", "oom"))
            doctor = inferd(scratch, "doctor")[1]
            runbook = inferd(scratch, "doctor", "runbook", "oom", "too-small")[1]
            done = inferd(scratch, *REMEDY)[1]
            time.sleep(2.0)  # what was under way when the limit came
            plant(scratch)
            time.sleep(PROOF_SECONDS + 3.0)
            code, proof = inferd(scratch, "doctor", "--since", str(PROOF_SECONDS))
            after = asyncio.run(seen(scratch, "1", "Time by stage"))
            return Story(before, doctor, runbook, done, proof, code, after, ooms(scratch))
    finally:
        scratch.stop()


def plant(scratch: Scratch) -> None:
    """The cap, once requests are answered."""
    answered = scratch.answered
    wait_for(lambda: scratch.answered > answered + 6, _PATIENCE_S, "load that is answered")
    scratch.client.post("/inferd/v1/drill/capacity", {"amount": CAP_BYTES})


def _run_out(scratch: Scratch) -> None:
    """The cap lifts after one step that failed; on a busy machine that one may have another cause."""
    for left in (2, 1, 0):
        plant(scratch)
        try:
            wait_for(lambda: ooms(scratch) > 0, _PATIENCE_S / 3, "an out-of-memory, for too little")
        except AssertionError:
            found = [each.cause for each in scratch.client.snapshot(["incidents"]).incidents or []]
            print(f"planted, and what came was {found}: {left} more attempts")
            if not left:
                raise
        else:
            return


def ooms(scratch: Scratch) -> int:
    return int(total(scraped(scratch.client.get("/metrics").decode()), 'inferd_oom_total{cause="capacity"}'))


def _found(scratch: Scratch) -> bool:
    return any(each.runbook == "oom" for each in scratch.client.snapshot(["findings"]).findings or [])


def inferd(scratch: Scratch, *words: str) -> tuple[int, str]:
    """The command line, as somebody on that machine has it."""
    env = {**os.environ, "RUNTIME_DIRECTORY": str(scratch.socket.parent), "STATE_DIRECTORY": str(scratch.state_dir)}
    done = subprocess.run([*INFERD, *words], env=env, capture_output=True, text=True, timeout=_PATIENCE_S, cwd=ROOT)
    return done.returncode, done.stdout.strip()


async def seen(scratch: Scratch, key: str, said: str) -> str:
    """A screen of `inferd top` on that daemon, once it says something."""
    client = scratch.client
    app = Top(
        LiveFeed(Endpoint(socket=scratch.socket)),
        runbook=lambda name: client.get(f"/inferd/v1/runbooks/{name}").decode(),
        environ={},
    )
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press(key)
        for _ in range(20 * _PATIENCE_S):
            await pilot.pause(0.05)
            shot = picture(app)
            if said in text_of(shot):
                return shot
    raise AssertionError(f"top does not say {said!r}:\n{text_of(shot)}")


def first_finding(report: str) -> str:
    """Of what the doctor prints: its heading and the first finding."""
    heading, _, rest = report.partition("\n\n")
    return f"{heading}\n\n{rest.partition(chr(10) * 2)[0]}"


def key_lines(text: str) -> list[str]:
    """What must be the same in every play: commands, findings and steps; figures and paths are not."""
    kept = [
        line for line in text.splitlines() if re.match(r"\s*(\$|→|INFO|WARNING|CRITICAL|No findings|limits:)", line)
    ]
    return [re.sub(r"[\d,.]+", "N", line).strip() for line in kept]


def page(story: Story, home: Callable[[str], str] = lambda text: text) -> str:
    """docs/incident.md; `home` hides where the scratch directory was."""
    return TEXT.format(
        doctor=home(first_finding(story.doctor)),
        section="too-small",
        runbook="doctor runbook oom too-small",
        section_text="\n".join(line for line in story.runbook.splitlines() if not line.startswith("```")),
        remedy=" ".join(REMEDY),
        done=story.done,
        proof_seconds=PROOF_SECONDS,
        proof=home(first_finding(story.proof)),
    )


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="inferd-incident-") as made:
        story = play(Path(made))

        def home(text: str) -> str:
            return text.replace(f"{made}/state", "/var/lib/inferd")

        DOCS.mkdir(exist_ok=True)
        PAGE.write_text(page(story, home), encoding="utf-8")
        (DOCS / "incident-top.svg").write_text(home(story.before), encoding="utf-8")
        (DOCS / "incident-after.svg").write_text(home(story.after), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {story.ooms} out of memory, the doctor's exit code at the end {story.proof_code}")


if __name__ == "__main__":
    main()
