"""100,000 short requests, or as many as half an hour holds, on a tiny model: nothing may be left behind."""

import tempfile
import time
from pathlib import Path

from tests import soaking
from tests.fakes.tiny import prepare_tiny, write_tiny
from tests.perf.harness import Findings
from tests.perf.served import serving
from tests.served import wait_for

TITLE = "100,000 short requests (tiny model)"
PROMISE = "over the second half at most 1 KiB a request in either process; no new series; every map back at idle"
REQUESTS = 100_000
SECONDS = 1800.0


def run(quick: bool) -> Findings:
    """One soak; the slope is fitted over the second half of the requests that it came to."""
    with tempfile.TemporaryDirectory(prefix="inferd-soak-") as folder:
        tiny = Path(folder) / "tiny"
        prepare_tiny(tiny, write_tiny("llama", tiny))
        args = ("--served-model-name", "tiny", "--max-num-seqs", "16", "--max-model-len", "64")
        with serving(*args, model=str(tiny)) as served:
            wait_for(lambda: soaking.idle(served), 60, "idle, and it says so")
            before = soaking.sizes(served)
            soaking.soak(served, 200 if quick else 2000)  # what is lazy is there
            known, began = soaking.series(served), time.perf_counter()
            soaked = soaking.soak(served, 500 if quick else REQUESTS, SECONDS, samples=50 if quick else 1000)
            took_s = time.perf_counter() - began
            wait_for(lambda: soaking.idle(served) and not soaking.grown(served, before), 60, "the maps are as before")
            fresh = soaking.series(served) - known
            slopes = soaked.slopes()
    return Findings(
        runs=[{"requests": n, "daemon_bytes": d, "engine_bytes": e} for n, d, e in sorted(soaked.points)],
        summary={
            "requests": soaked.requests,
            "requests a second": round(soaked.requests / took_s, 1),
            "daemon: bytes a request": round(slopes["daemon"], 1),
            "engine: bytes a request": round(slopes["engine"], 1),
            "new series": len(fresh),
            "maps above idle at the end": 0,
        },
        # A few hundred requests are all warm-up: they only show that the script works.
        met=None if quick else max(slopes.values()) <= soaking.MOST_BYTES_A_REQUEST and not fresh,
        notes=sorted(fresh),
    )
