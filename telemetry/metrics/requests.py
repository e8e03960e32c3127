"""Rows about requests: how many, how they ended, how long each stage took."""

from telemetry import buckets
from telemetry.events import FINISH_REASONS, OVERLAPS, STAGES, WAITING_REASONS
from telemetry.metric import Metric, Reading, View, each, one


def _now(view: View) -> list[Reading]:
    queue = view.state.queue
    reasons = {"capacity": queue.capacity, "kv": queue.kv, "budget": queue.budget}
    waiting: list[Reading] = [(("waiting", reason), count) for reason, count in reasons.items()]
    fresh = max(0, queue.waiting - sum(reasons.values()))
    return [
        (("running", ""), queue.running),
        (("preempted", ""), queue.preempted),
        (("waiting", ""), fresh),
        *waiting,
    ]


ROWS = (
    Metric(
        "inferd_requests",
        "gauge",
        "Choices in the engine now. A waiting one has a reason once a step has refused it.",
        _now,
        {"state": ("waiting", "running", "preempted"), "reason": ("", *WAITING_REASONS)},
    ),
    Metric(
        "inferd_request_stage_seconds",
        "histogram",
        "Time of a choice by stage; the stages partition arrival to last byte. Every choice, however it ended.",
        lambda view: each(view.state.stages),
        {"stage": STAGES},
        buckets.STAGE,
    ),
    Metric(
        "inferd_request_overlap_seconds",
        "histogram",
        "Work and stall inside the stages; never added to them.",
        lambda view: each(view.state.overlaps),
        {"kind": OVERLAPS},
        buckets.STAGE,
    ),
    Metric(
        "inferd_time_to_first_token_seconds",
        "histogram",
        "From arrival in the daemon to the first token of each choice that had one.",
        lambda view: one(view.state.ttft),
        buckets=buckets.TTFT,
    ),
    Metric(
        "inferd_inter_token_latency_seconds",
        "histogram",
        "Gap between two tokens of a choice, as the engine made them.",
        lambda view: one(view.state.gap),
        buckets=buckets.TOKEN,
    ),
    Metric(
        "inferd_time_per_output_token_seconds",
        "histogram",
        "Mean gap of each finished choice with at least two tokens.",
        lambda view: one(view.state.per_token),
        buckets=buckets.TOKEN,
    ),
    Metric(
        "inferd_request_seconds",
        "histogram",
        "From arrival in the daemon to the last byte, of every choice that was not shed or rejected.",
        lambda view: one(view.state.latency),
        buckets=buckets.LATENCY,
    ),
    Metric(
        "inferd_requests_finished",
        "counter",
        "Choices by why they ended; each ends in exactly one.",
        lambda view: each(view.state.finished),
        {"reason": FINISH_REASONS},
    ),
    Metric(
        "inferd_output_tokens_per_request",
        "histogram",
        "Tokens of each answer: shows answers cut short under load.",
        lambda view: one(view.state.output_lengths),
        buckets=buckets.TOKENS,
    ),
)
