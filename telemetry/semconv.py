"""Names of spans and their attributes: OpenTelemetry's GenAI conventions, and ours.

It must not know the OpenTelemetry SDK. What a client wrote (prompts, stop strings) is in no attribute. Enter at
`request_attributes` and `metric_attributes`.
"""

from typing import Final

import msgspec

from telemetry.events import Decision, EngineStarted, LimitsView, RequestRecord

PROVIDER: Final = "inferd"
DECISION: Final = "inferd.decision"  # a span event
STAGE_SPAN: Final = "inferd.stage.{stage}"
START_SPAN: Final = "inferd.start"
START_PHASE_SPAN: Final = "inferd.start.{phase}"
CHUNK: Final = "inferd.chunk.number"  # from 1, of a piece in which part of the prompt was computed
CHUNK_TOKENS: Final = "inferd.chunk.tokens"
TRACE_LEVELS: Final = ("off", "request", "detail")
FAULTS: Final = (
    "error",
    "deadline",
)  # of these the server is the cause; the others are the client's or the limits' doing
_UNSERVED: Final = ("error", "abort", "shed", "deadline", "rejected")

Attributes = dict[str, str | int | float | bool | tuple[str, ...]]


def request_attributes(record: RequestRecord, limits: LimitsView | None = None, block_size: int = 0) -> Attributes:
    """The attributes of a choice's root span. What did not happen, or is not known, has no attribute."""
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
    if record.kv_blocks and block_size:
        attributes["inferd.kv.tail_waste_ratio"] = record.kv_tail_slots / (record.kv_blocks * block_size)
    if limits is not None:
        attributes |= {f"inferd.limits.{name}": value for name, value in msgspec.structs.asdict(limits).items()}
    if error := error_type(record):
        attributes["error.type"] = error
    return attributes


def decision_attributes(decision: Decision) -> Attributes:
    """The attributes of a span event: what the tuner changed, why, and what came of it if that is known."""
    return {
        "inferd.decision.number": decision.number,
        "inferd.decision.rule": decision.rule,
        "inferd.decision.knob": decision.knob,
        "inferd.decision.direction": decision.direction,
        "inferd.decision.before": decision.before,
        "inferd.decision.after": decision.after,
        "inferd.decision.why": decision.why,
        "inferd.decision.verdict": decision.verdict,
        **{f"inferd.decision.evidence.{name}": value for name, value in decision.evidence.items()},
        **{f"inferd.decision.predicted.{name}": value for name, value in decision.predicted.items()},
        **{f"inferd.decision.measured.{name}": value for name, value in decision.measured.items()},
    }


def start_attributes(event: EngineStarted) -> Attributes:
    """The attributes of a start's root span: which engine, and what was resolved."""
    plain = {name: value for name, value in event.resolved.items() if isinstance(value, str | int | float | bool)}
    return {
        "inferd.engine.id": event.engine_id,
        "inferd.engine.restarts": event.restarts,
        "process.pid": event.pid,
        **{f"inferd.resolved.{name}": value for name, value in plain.items()},
    }


def metric_attributes(record: RequestRecord) -> dict[str, str]:
    """The attributes of `gen_ai.server.*`; every value is of a closed set."""
    found = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
    }
    if error := error_type(record):
        found["error.type"] = error
    return found


def error_type(record: RequestRecord) -> str:
    """Empty for a choice that was served."""
    return record.error or (record.reason if record.reason in _UNSERVED else "")


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
