"""vLLM's names, from vLLM's public documentation, so that dashboards, the Gateway API inference extension, llm-d and
KEDA work unchanged. The same figures as the native rows, with vLLM's label names and buckets. Rows marked legacy are
older names that shipped dashboards still query.
"""

from telemetry import buckets
from telemetry.events import PREEMPTION_CAUSES
from telemetry.metric import OPEN, Metric, Reading, View, each, one, unowned
from telemetry.state import State

_CACHE = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "num_cpu_blocks")
_FINISHED = {"stop": ("stop",), "length": ("length",), "abort": ("abort", "deadline"), "error": ("error",)}


def _usage(view: View) -> list[Reading]:
    blocks = view.state.blocks
    return one(blocks.active / blocks.total if blocks and blocks.total else None)


def _waiting_by_reason(view: View) -> list[Reading]:
    """vLLM knows two: 'capacity' (waits for room) and 'deferred' (held back for a passing reason)."""
    queue = view.state.queue
    return each({"capacity": queue.waiting - queue.budget, "deferred": queue.budget})


def _cache_config(view: View) -> list[Reading]:
    started = view.state.started
    if started is None:
        return []
    asked = started.resolved.get
    values = (asked("block_size"), asked("kv_blocks"), asked("kv_dtype"), asked("prefix_cache"), 0)
    return [(tuple(str(value) for value in values), 1)]


def _success(view: View) -> list[Reading]:
    """Without shed and rejected choices: in vLLM's terms these never were requests of the engine."""
    finished = view.state.finished
    return each({name: sum(finished[ours] for ours in reasons) for name, reasons in _FINISHED.items()})


def _queries(state: State) -> int:
    return sum(state.prefix.values())


def _hits(state: State) -> int:
    return state.prefix["hit"]


ROWS = (
    Metric(
        "vllm:num_requests_running",
        "gauge",
        "Requests in the running batch.",
        lambda view: one(view.state.queue.running),
    ),
    Metric(
        "vllm:num_requests_waiting",
        "gauge",
        "Requests that wait.",
        lambda view: one(view.state.queue.waiting),
    ),
    Metric(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "Requests that wait, by reason.",
        _waiting_by_reason,
        {"reason": ("capacity", "deferred")},
    ),
    Metric("vllm:kv_cache_usage_perc", "gauge", "KV blocks in use, 0 to 1.", _usage),
    Metric(
        "vllm:cache_config_info",
        "gauge",
        "1, with the configuration of the KV cache as labels.",
        _cache_config,
        dict.fromkeys(_CACHE, OPEN),
    ),
    Metric(
        "vllm:lora_requests_info",
        "gauge",
        "Running adapters; none are served.",
        unowned,
        {"max_lora": OPEN, "waiting_lora_adapters": OPEN, "running_lora_adapters": OPEN},
    ),
    Metric(
        "vllm:num_preemptions",
        "counter",
        "Preemptions by the engine.",
        lambda view: one(sum(view.state.preemptions[cause] for cause in PREEMPTION_CAUSES)),
    ),
    Metric(
        "vllm:prompt_tokens",
        "counter",
        "Prompt tokens of finished requests.",
        lambda view: one(view.state.prompt_tokens),
    ),
    Metric(
        "vllm:generation_tokens",
        "counter",
        "Generated tokens of finished requests.",
        lambda view: one(view.state.output_tokens),
    ),
    Metric(
        "vllm:prompt_tokens_cached",
        "counter",
        "Prompt tokens that were found in the cache, of finished requests.",
        lambda view: one(view.state.cached_prompt_tokens),
    ),
    Metric(
        "vllm:request_success",
        "counter",
        "Finished requests.",
        _success,
        {"finished_reason": tuple(_FINISHED)},
    ),
    Metric(
        "vllm:prefix_cache_queries",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        lambda view: one(_queries(view.state)),
    ),
    Metric(
        "vllm:prefix_cache_hits",
        "counter",
        "Prompt tokens found in the prefix cache.",
        lambda view: one(_hits(view.state)),
    ),
    Metric("vllm:spec_decode_num_drafts", "counter", "Drafts.", unowned),
    Metric("vllm:spec_decode_num_draft_tokens", "counter", "Draft tokens.", unowned),
    Metric("vllm:spec_decode_num_accepted_tokens", "counter", "Accepted draft tokens.", unowned),
    Metric(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Accepted draft tokens by position.",
        unowned,
        {"position": OPEN},
    ),
    Metric(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "Time to first token, from arrival.",
        lambda view: one(view.state.ttft),
        buckets=buckets.VLLM_TTFT,
    ),
    Metric(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "Gap between two tokens of a request.",
        lambda view: one(view.state.gap),
        buckets=buckets.VLLM_INTER_TOKEN,
    ),
    Metric(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "Mean time per output token of a request.",
        lambda view: one(view.state.per_token),
        buckets=buckets.VLLM_INTER_TOKEN,
    ),
    Metric(
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "From arrival to the end.",
        lambda view: one(view.state.latency),
        buckets=buckets.VLLM_LATENCY,
    ),
    Metric(
        "vllm:request_queue_time_seconds",
        "histogram",
        "From queued to scheduled.",
        lambda view: one(view.state.queued),
        buckets=buckets.VLLM_LATENCY,
    ),
    Metric(
        "vllm:request_prefill_time_seconds",
        "histogram",
        "From scheduled to the first token.",
        lambda view: one(view.state.prefilled),
        buckets=buckets.VLLM_LATENCY,
    ),
    Metric(
        "vllm:request_decode_time_seconds",
        "histogram",
        "From the first to the last token.",
        lambda view: one(view.state.decoded),
        buckets=buckets.VLLM_LATENCY,
    ),
    Metric(
        "vllm:request_inference_time_seconds",
        "histogram",
        "From scheduled to the last token.",
        lambda view: one(view.state.inferred),
        buckets=buckets.VLLM_LATENCY,
    ),
    Metric(
        "vllm:iteration_tokens_total",
        "histogram",
        "Tokens per engine step.",
        lambda view: one(view.state.iteration_tokens),
        buckets=buckets.VLLM_ITERATION_TOKENS,
    ),
    Metric(
        "vllm:request_prompt_tokens",
        "histogram",
        "Prompt tokens of a request.",
        lambda view: one(view.state.prompt_lengths),
        buckets=buckets.TOKENS,
    ),
    Metric(
        "vllm:request_generation_tokens",
        "histogram",
        "Generated tokens of a request.",
        lambda view: one(view.state.output_lengths),
        buckets=buckets.TOKENS,
    ),
    Metric(
        "vllm:request_params_max_tokens",
        "histogram",
        "The max_tokens of a request.",
        lambda view: one(view.state.max_tokens),
        buckets=buckets.TOKENS,
    ),
    Metric(
        "vllm:request_max_num_generation_tokens",
        "histogram",
        "Longest answer of a request.",
        lambda view: one(view.state.longest_outputs),
        buckets=buckets.TOKENS,
    ),
    Metric(
        "vllm:request_params_n",
        "histogram",
        "The n of a request.",
        lambda view: one(view.state.choices),
        buckets=buckets.VLLM_N,
    ),
    Metric("vllm:gpu_cache_usage_perc", "gauge", "Older name of kv_cache_usage_perc.", _usage, legacy=True),
    Metric(
        "vllm:time_per_output_token_seconds",
        "histogram",
        "Older name of inter_token_latency_seconds.",
        lambda view: one(view.state.gap),
        buckets=buckets.VLLM_INTER_TOKEN,
        legacy=True,
    ),
    Metric(
        "vllm:gpu_prefix_cache_hits",
        "counter",
        "Older name of prefix_cache_hits.",
        lambda view: one(_hits(view.state)),
        legacy=True,
    ),
    Metric(
        "vllm:gpu_prefix_cache_queries",
        "counter",
        "Older name of prefix_cache_queries.",
        lambda view: one(_queries(view.state)),
        legacy=True,
    ),
)
