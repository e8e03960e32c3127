"""Memory: who has the bytes. The question: who has the bytes? Enter at `panels`."""

from typing import Final

from telemetry.grafana.panels import STACK, Panels, Query, graph, metric, rate

TITLE: Final = "Memory: who has the bytes"


def panels() -> Panels:
    """The panels of this row, in reading order."""
    return [
        graph(
            "Memory by owner",
            "The ladder: the owners sum to the limit. unbooked is what nobody admits to: it should be flat.",
            [
                Query(f"sum by (owner) ({metric('inferd_memory_bytes')})", "{{owner}}"),
                Query(f"sum({metric('inferd_memory_limit_bytes')})", "limit"),
            ],
            unit="bytes",
            width=12,
            stack=STACK,
            lines=["limit"],
        ),
        graph(
            "In use, reserved, watermark",
            "Above the watermark admission holds back. Reserved but not in use is given back at once when needed.",
            [
                Query(f"max by (device) ({metric('inferd_memory_used_ratio')})", "used {{device}}"),
                Query(f"max by (device) ({metric('inferd_memory_reserved_ratio')})", "reserved {{device}}"),
                Query(f"min by (device) ({metric('inferd_memory_watermark_ratio')})", "watermark {{device}}"),
            ],
            unit="percentunit",
            width=12,
        ),
        graph(
            "Unbooked",
            "Measured but owned by nobody. A floor that rises is a leak.",
            [
                Query(
                    f"sum by (instance, device) ({metric('inferd_memory_bytes', owner='unbooked')})",
                    "{{instance}} {{device}}",
                )
            ],
            unit="bytes",
        ),
        graph(
            "Resident memory of our processes",
            "Daemon and engine as the kernel counts them.",
            [Query(f"sum by (process) ({metric('inferd_process_resident_bytes')})", "{{process}}")],
            unit="bytes",
        ),
        graph(
            "Stalled for memory",
            "Share of the time in which tasks waited for memory (PSI). Anything above zero comes before an OOM kill.",
            [Query(rate("inferd_memory_pressure_seconds_total", by="kind"), "{{kind}}")],
            unit="percentunit",
        ),
    ]
