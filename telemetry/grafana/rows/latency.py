"""Latency: where the time went. The question: where did the time of a request go? Enter at `panels`."""

from typing import Final

from grafana_foundation_sdk.models.common import StackingMode

from telemetry.grafana.panels import RATE, STACK, Panels, Query, graph, metric, percentiles, quantile, rate

TITLE: Final = "Latency: where the time went"


def panels() -> Panels:
    """The panels of this row, in reading order."""
    per_stage = rate("inferd_request_stage_seconds_sum", by="stage")
    choices = rate("inferd_requests_finished_total")
    return [*_stages(per_stage, choices), *_steps()]


def _stages(per_stage: str, choices: str) -> Panels:
    per_request = f"{per_stage} / ignoring (stage) group_left () {choices}"
    overlap = f"{rate('inferd_request_overlap_seconds_sum', by='kind')} / ignoring (kind) group_left () {choices}"
    return [
        graph(
            "Where the request time went",
            "Mean seconds per choice by stage. The stages are a partition: the height is the whole latency.",
            [Query(per_request, "{{stage}}")],
            unit="s",
            width=12,
            stack=STACK,
        ),
        graph(
            "Share of each stage",
            "The same as shares. queue: too little capacity. prefill: long prompts. preempted: memory.",
            [Query(per_stage, "{{stage}}")],
            unit="s",
            width=12,
            stack=StackingMode.PERCENT,
        ),
        graph(
            "Slowest stages (p99)",
            "Percentiles do not add up: this says which stage has the tail, not how large its share is.",
            [Query(quantile(0.99, "inferd_request_stage_seconds", by="stage"), "{{stage}}")],
            unit="s",
        ),
        graph(
            "Inside the stages",
            "Overlapped work and stall, mean seconds per choice. Already contained in the stages: never add them.",
            [Query(overlap, "{{kind}}")],
            unit="s",
        ),
    ]


def _steps() -> Panels:
    return [
        graph(
            "Time per output token",
            "Mean gap of each finished choice: one slow request in a hundred is visible here.",
            percentiles("inferd_time_per_output_token_seconds"),
            unit="s",
        ),
        graph(
            "Engine time by phase",
            "Share of the wall clock. The rest is idle: if requests wait meanwhile, something is wrong.",
            [Query(f"avg by (phase) (rate({metric('inferd_step_seconds_sum')}{RATE}))", "{{phase}}")],
            unit="percentunit",
            stack=STACK,
            top=1,
        ),
        graph(
            "Device time by phase",
            "Share of the wall clock in which the device computes.",
            [Query(f"avg by (phase) (rate({metric('inferd_step_device_seconds_sum')}{RATE}))", "{{phase}}")],
            unit="percentunit",
            stack=STACK,
        ),
        graph(
            "What bound the steps",
            "compute: batch less. bandwidth: batch more. overhead: host or launches. Steps per second.",
            [Query(rate("inferd_step_bound_total", by="by"), "{{by}}")],
            stack=STACK,
        ),
    ]
