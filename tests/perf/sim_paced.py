"""The simulator against a live daemon whose device takes a known time: what it gets wrong here is not the machine's
speed, but the way of requests: what the daemon, the wire and a client add, and who is let in when."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fakes import paced_main
from tests.fakes.tiny_served import tiny_model
from tests.perf import sim_error
from tests.perf.harness import Findings
from tests.perf.served import serving

TITLE = "Simulated against live goodput, on a device of known speed"
PROMISE = "off by at most 20 % at settings and loads that it was not calibrated by"


def run(quick: bool) -> Findings:
    command = [sys.executable, paced_main.__file__]
    with (
        TemporaryDirectory(prefix="inferd-perf-") as folder,
        serving(model=str(tiny_model(Path(folder))), command=command) as served,
    ):
        return sim_error.compared(served, quick)
