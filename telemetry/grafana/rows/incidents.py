"""Incidents. The question: what broke, and what do we not know? Enter at `panels`."""

from typing import Final

from telemetry.grafana.panels import RATE, STACK, Panels, Query, graph, metric, quantile

TITLE: Final = "Incidents"


def panels() -> Panels:
    """The panels of this row, in reading order."""
    return [*_faults(), *_signs()]


def _count(name: str, by: str) -> list[Query]:
    return [Query(f"sum by ({by}) (increase({metric(name)}{RATE}))", f"{{{{{by}}}}}")]


def _faults() -> Panels:
    return [
        graph(
            "Alerts firing",
            "Each has a runbook.",
            [Query('count by (alertname) (ALERTS{alertname=~"Inferd.*",alertstate="firing"})', "{{alertname}}")],
            stack=STACK,
        ),
        graph(
            "Out of memory, by cause",
            "The bundle of each says why: inferd doctor.",
            _count("inferd_oom_total", "cause"),
            stack=STACK,
        ),
        graph(
            "Incidents, by cause",
            "Faults that were classified and written down.",
            _count("inferd_incidents_total", "cause"),
            stack=STACK,
        ),
        graph(
            "Engine restarts, by cause",
            "Each ended the requests that were running.",
            _count("inferd_engine_restarts_total", "cause"),
            stack=STACK,
        ),
        graph(
            "Telemetry dropped, by sink",
            "Loss is visible: while this is not zero, other panels may be too low.",
            _count("inferd_telemetry_dropped_total", "sink"),
            stack=STACK,
        ),
    ]


def _signs() -> Panels:
    return [
        graph(
            "Age of what is shown",
            "Progress: since the engine's last step or tick. Snapshot: since its last report.",
            [
                Query(f"max({metric('inferd_engine_progress_age_seconds')})", "progress"),
                Query(f"max({metric('inferd_snapshot_age_seconds')})", "snapshot"),
            ],
            unit="s",
        ),
        graph(
            "Event loop lag (p99)",
            "How late a loop woke up. A starving loop delays everything that it serves.",
            [Query(quantile(0.99, "inferd_loop_lag_seconds", by="loop"), "{{loop}}")],
            unit="s",
        ),
        graph(
            "Entries of queues and maps",
            "Each must fall back to its idle value when the load ends.",
            [Query(f"sum by (process, map) ({metric('inferd_map_entries')})", "{{process}} {{map}}")],
        ),
        graph(
            "Start-up time by phase",
            "What the last start of the engine spent its time on.",
            [Query(f"max by (phase) ({metric('inferd_engine_start_seconds')})", "{{phase}}")],
            unit="s",
            stack=STACK,
        ),
    ]
