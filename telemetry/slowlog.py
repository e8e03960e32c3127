"""SlowLog: one line in the log for every choice that took long: where its time went, and what it suffered.

Owns the threshold and the wording. It must not know how the log is written. Enter at `SlowLog.take`, a sink of the bus.
"""

import logging

from telemetry.events import Event, RequestRecord

log = logging.getLogger("inferd.slow")


class SlowLog:
    """`threshold_s`: from so many seconds on, arrival to last byte."""

    wants = (RequestRecord,)

    def __init__(self, threshold_s: float) -> None:
        self._threshold_ns = int(threshold_s * 1e9)

    def take(self, batch: list[Event]) -> None:
        for event in batch:
            if isinstance(event, RequestRecord) and event.at_ns - event.arrival_ns >= self._threshold_ns:
                log.warning("%s", explain(event), extra={"request_id": event.group_id, "trace_id": event.trace_id})


def explain(record: RequestRecord) -> str:
    """The record as a sentence: its longest stages first."""
    stages = sorted(record.stages.items(), key=lambda item: -item[1])
    parts = [f"{name} {ns / 1e9:.2f} s" for name, ns in stages if ns >= 5_000_000] or ["no stage above 5 ms"]
    said = f"slow request {record.request_id} took {(record.at_ns - record.arrival_ns) / 1e9:.2f} s: {', '.join(parts)}"
    said += f"; {record.prompt_tokens} prompt tokens ({record.cached_tokens} cached) in {record.prefill_chunks} chunks"
    said += f", {record.output_tokens} output tokens"
    stall_ns = record.overlaps.get("decode_stall", 0)
    if stall_ns:
        said += f"; others' prefill stalled it for {stall_ns / 1e9:.2f} s"
    if record.preemptions:
        said += f"; preempted {record.preemptions} times, {record.preempted_tokens} tokens computed again"
    return f"{said}; it ended with {record.error or record.reason}"
