"""Names of spans and their attributes: OpenTelemetry's GenAI conventions, and ours.

It must not know the OpenTelemetry SDK. Enter at `request_attributes`.
"""

from typing import Final

from telemetry.events import RequestRecord

PROVIDER: Final = "inferd"
STAGE_SPAN: Final = "inferd.stage.{stage}"

Attributes = dict[str, str | int | float | bool | tuple[str, ...]]


def request_attributes(record: RequestRecord) -> Attributes:
    """The attributes of a choice's root span. What did not happen has no attribute."""
    attributes: Attributes = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.temperature": record.temperature,
        "gen_ai.request.top_p": record.top_p,
        "gen_ai.request.top_k": record.top_k,
        "gen_ai.request.seed": record.seed,
        "gen_ai.request.choice.count": record.n,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": (record.reason,),
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.output_tokens,
        "http.response.status_code": record.status,
        "inferd.request.id": record.group_id,
        "inferd.prefill.chunks": record.prefill_chunks,
        "inferd.decode.stall_ns": record.overlaps.get("decode_stall", 0),
        "inferd.preemptions": record.preemptions,
        "inferd.preempted_tokens": record.preempted_tokens,
        "inferd.kv.blocks": record.kv_blocks,
        **_latencies(record),
    }
    if record.error or record.reason in ("error", "abort", "shed", "deadline", "rejected"):
        attributes["error.type"] = record.error or record.reason
    return attributes


def _latencies(record: RequestRecord) -> Attributes:
    """Seconds, under the names that older dashboards of vLLM's traces use."""
    found: Attributes = {"gen_ai.latency.e2e": (record.at_ns - record.arrival_ns) / 1e9}
    if record.scheduled_ns and record.queued_ns:
        found["gen_ai.latency.time_in_queue"] = (record.scheduled_ns - record.queued_ns) / 1e9
    if record.first_token_ns:
        found["gen_ai.latency.time_to_first_token"] = (record.first_token_ns - record.arrival_ns) / 1e9
    if record.first_token_ns and record.scheduled_ns:
        found["gen_ai.latency.time_in_model_prefill"] = (record.first_token_ns - record.scheduled_ns) / 1e9
        found["gen_ai.latency.time_in_model_decode"] = (record.last_token_ns - record.first_token_ns) / 1e9
        found["gen_ai.latency.time_in_model_inference"] = (record.last_token_ns - record.scheduled_ns) / 1e9
    return found
