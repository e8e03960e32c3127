"""`inferd`, but without recorder, journal, bundles and traces: the other side of what telemetry costs.

Takes inferd's own command line. Not a mode of the product: nobody should run without them.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import daemon.commands.serve as serve
import daemon.instruments as instruments
from daemon.settings import Settings
from engine.config import EngineConfig
from telemetry.bus import Bus, Sink
from telemetry.recorder import Recorder

KEPT = ("fold", "feed")  # /metrics and the event feed are part of serving


class BareBus(Bus):
    """Only the sinks that answer questions."""

    def __init__(self, _: Recorder | None, sinks: Mapping[str, Sink], **how: Any) -> None:
        super().__init__(None, {name: sinks[name] for name in KEPT}, **how)


def main() -> None:
    """Serve."""
    whole = serve.engine_config

    def without_ring(settings: Settings, directory: Path, state_dir: Path | None) -> EngineConfig:
        return whole(settings, directory, None)

    vars(serve)["engine_config"] = without_ring
    vars(instruments)["Bus"] = BareBus
    from daemon.cli import main as inferd

    sys.argv[0] = "inferd"
    sys.exit(inferd())


if __name__ == "__main__":
    main()
