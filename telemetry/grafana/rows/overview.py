"""Overview. The question: is it well, is it fast, is it full? Enter at `panels`."""

from typing import Final

from telemetry.grafana.panels import STACK, Panels, Query, graph, metric, percentiles, quantile, rate, stat, states

TITLE: Final = "Overview"


def panels() -> Panels:
    """The panels of this row, in reading order."""
    return [*_figures(), *_graphs()]


def _figures() -> Panels:
    running, waiting = metric("inferd_requests", state="running"), metric("inferd_requests", state="waiting")
    return [
        states(
            "State",
            "How many daemons are in which state of their life. Anything but ready is worth a look.",
            f"count by (state) ({metric('inferd_state')} == 1)",
        ),
        stat("Running", "Choices that are being computed.", f"sum({running})"),
        stat("Waiting", "Choices in the queue; the next row says for what they wait.", f"sum({waiting})"),
        stat(
            "TTFT p99",
            "From arrival in the daemon to the first token.",
            quantile(0.99, "inferd_time_to_first_token_seconds"),
            unit="s",
            warn=2,
            bad=5,
        ),
        stat(
            "Inter-token p99",
            "Gap between two tokens of a choice: what a reader of a stream feels.",
            quantile(0.99, "inferd_inter_token_latency_seconds"),
            unit="s",
            warn=0.2,
            bad=0.5,
        ),
        stat("Output tokens/s", "Tokens given to clients.", rate("inferd_step_tokens_total", kind="decode")),
        stat(
            "Memory in use",
            "The fullest device. What is in use, without blocks that nobody holds.",
            f"max({metric('inferd_memory_used_ratio')})",
            unit="percentunit",
            warn=0.9,
            bad=0.97,
        ),
        stat(
            "Engine progress",
            "Since the engine's last step, part of a step or idle tick. It grows only when the engine is stuck.",
            f"max({metric('inferd_engine_progress_age_seconds')})",
            unit="s",
            warn=10,
            bad=30,
        ),
    ]


def _graphs() -> Panels:
    return [
        graph(
            "Time to first token",
            "The dots are traces: click one to see where that request's time went.",
            percentiles("inferd_time_to_first_token_seconds"),
            unit="s",
        ),
        graph(
            "Inter-token latency",
            "Grows with the batch; spikes are usually somebody's prefill.",
            percentiles("inferd_inter_token_latency_seconds"),
            unit="s",
        ),
        graph(
            "Request latency",
            "From arrival to the last byte. Depends on how long the answers are: compare with tokens per answer.",
            percentiles("inferd_request_seconds"),
            unit="s",
        ),
        graph(
            "Throughput",
            "Positions computed per second. Recompute is work done twice, after preemption.",
            [Query(rate("inferd_step_tokens_total", by="kind"), "{{kind}}")],
            stack=STACK,
        ),
        graph(
            "Requests now",
            "Waiting for capacity: rows are full. For kv: memory is. For budget: the step's tokens are.",
            [Query(f"sum by (state, reason) ({metric('inferd_requests')})", "{{state}} {{reason}}")],
            stack=STACK,
        ),
        graph(
            "Finished per second",
            "Every choice ends in exactly one of these. Shed: 429 under load. Rejected: a bad request.",
            [Query(rate("inferd_requests_finished_total", by="reason"), "{{reason}}")],
            unit="reqps",
            stack=STACK,
        ),
    ]
