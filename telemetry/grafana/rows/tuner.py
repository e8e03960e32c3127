"""Tuner and device. The question: what was changed, and did it help? Enter at `panels`."""

from typing import Final

from telemetry.grafana.panels import RATE, Panels, Query, graph, mean, metric, quantile

TITLE: Final = "Tuner and device"


def panels() -> Panels:
    """The panels of this row, in reading order."""
    return [
        graph(
            "Live limits",
            "Every limit that may change while serving, by its knob.",
            [Query(f"max by (knob) ({metric('inferd_tuner_limit')})", "{{knob}}")],
        ),
        graph(
            "Decisions",
            "Changes by rule and direction. Ups and downs of one knob in turn are an oscillation.",
            [
                Query(
                    f"sum by (rule, knob, direction) (increase({metric('inferd_tuner_decisions_total')}{RATE}))",
                    "{{rule}} {{knob}} {{direction}}",
                )
            ],
        ),
        graph(
            "Missed targets",
            "1 while a target of latency is missed; what `inferd tune status` says is why.",
            [Query(f"max by (target) ({metric('inferd_target_missed')})", "{{target}}")],
        ),
        graph(
            "Error of the step cost model",
            "The tuner predicts with this model: a large error means that its decisions are guesses.",
            [Query(f"max by (instance) ({metric('inferd_step_cost_error_ratio')})", "{{instance}}")],
            unit="percentunit",
        ),
        graph(
            "Tokens per answer",
            "If it falls while the queue grows, answers are being cut short under load.",
            [
                Query(mean("inferd_output_tokens_per_request"), "mean"),
                Query(quantile(0.5, "inferd_output_tokens_per_request"), "p50"),
                Query(quantile(0.95, "inferd_output_tokens_per_request"), "p95"),
            ],
        ),
        graph(
            "Device utilisation",
            "Share of time in which a kernel ran (NVML). High with no tokens is a wedged engine.",
            [Query(f"max by (device) ({metric('inferd_device_utilization_ratio')})", "{{device}}")],
            unit="percentunit",
        ),
        graph(
            "Device power",
            "Watts. Full utilisation at idle power is a device that waits for itself.",
            [Query(f"max by (device) ({metric('inferd_device_power_watts')})", "{{device}}")],
            unit="watt",
        ),
    ]
