"""The disk takes no more: the journal, the flight recorder or a bundle cannot be written."""

from typing import Final

from runbooks.check import finding
from runbooks.evidence import Evidence, lost
from telemetry.events import Finding

SINKS: Final = ("journal", "recorder", "bundle")


def check(evidence: Evidence) -> Finding | None:
    host = evidence.host
    refused = {sink: count for sink, count in lost(evidence).items() if sink in SINKS and count}
    scarce = host.disk_free_bytes is not None and host.disk_free_bytes < evidence.targets.disk_free_bytes
    if not refused and not scarce:
        return None
    free = "not reported" if host.disk_free_bytes is None else f"{host.disk_free_bytes / 2**20:,.0f} MiB"
    return finding(
        evidence,
        "disk_full",
        "warning",
        f"what should outlive a crash cannot be written: {', '.join(refused)}"
        if refused
        else f"the disk of the state directory is nearly full: {free} left",
        confidence=0.95,
        next_step="inferd doctor runbook disk_full make-room",
        section="make-room",
        explains=("telemetry_lost",),
        lost=", ".join(f"{sink} {count}" for sink, count in refused.items()) or "nothing yet",
        free=free,
        state_directory=host.state_dir or "not reported",
    )
