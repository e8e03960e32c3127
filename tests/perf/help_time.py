"""How long `inferd --help` takes, as a user waits for it."""

import subprocess
import time

from tests.perf.harness import REPO, Findings
from tests.perf.served import INFERD

TITLE = "`inferd --help`"
PROMISE = "under 0.3 s"


def run(quick: bool) -> Findings:
    """The median of 20 runs after one that warms the page cache."""
    runs = []
    for i in range(3 if quick else 21):
        began = time.perf_counter()
        subprocess.run([*INFERD, "--help"], cwd=REPO, check=True, stdout=subprocess.DEVNULL, timeout=60)
        runs.append({"run": i, "seconds": round(time.perf_counter() - began, 4)})
    seconds = sorted(r["seconds"] for r in runs[1:])
    median = seconds[len(seconds) // 2]
    return Findings(
        runs=runs,
        summary={"median_s": median, "fastest_s": seconds[0], "slowest_s": seconds[-1]},
        met=median < 0.3,
        notes=["the first run is not counted: it reads the files from disk"],
    )
