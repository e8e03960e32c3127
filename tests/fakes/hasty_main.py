"""`inferd` whose tuner looks every second, earns a change every second and tries again soon after a rollback, so that a
test on a busy machine, where a verdict of seconds is often wrong, can wait until one is right."""

import sys
from functools import partial

import daemon.house
import daemon.tuning
from autotune.online import Pace, Tuner
from daemon.cli import main

if __name__ == "__main__":
    daemon.tuning.Tuner = partial(Tuner, pace=Pace(hourly=3600.0, back_off_s=3.0))  # type: ignore[assignment, misc]
    daemon.house.Tuning = partial(daemon.tuning.Tuning, period_s=1.0)  # type: ignore[assignment, misc]
    sys.argv[0] = "inferd"
    sys.exit(main())
