"""KV cache. The question: is the cache full, torn or useless? Enter at `panels`."""

from typing import Final

from telemetry.grafana.panels import STACK, Panels, Query, graph, mean, metric, quantile, rate

TITLE: Final = "KV cache"


def panels() -> Panels:
    """The panels of this row, in reading order."""
    return [*_blocks(), *_lost_and_saved()]


def _blocks() -> Panels:
    hits, prompts = rate("inferd_prefix_cache_tokens_total", outcome="hit"), rate("inferd_prefix_cache_tokens_total")
    return [
        graph(
            "KV blocks",
            "Active ones are held by sequences; cached ones are kept for reuse and given up at once when needed.",
            [Query(f"sum by (state) ({metric('inferd_kv_blocks')})", "{{state}}")],
            stack=STACK,
        ),
        graph(
            "Fragmentation",
            "tail: empty slots of last blocks. stranded: held by choices that do not run. allocator: in pieces.",
            [Query(f"max by (kind) ({metric('inferd_kv_fragmentation_ratio')})", "{{kind}}")],
            unit="percentunit",
        ),
        graph(
            "Prefix cache",
            "Prompt tokens per second. too_short: the shared prefix is shorter than a block, so it cannot hit.",
            [Query(rate("inferd_prefix_cache_tokens_total", by="outcome"), "{{outcome}}")],
            stack=STACK,
        ),
        graph(
            "Prefix hit ratio",
            "Share of prompt tokens that were not computed. Recomputation after preemption is counted apart.",
            [Query(f"{hits} / {prompts}", "hits")],
            unit="percentunit",
            top=1,
        ),
    ]


def _lost_and_saved() -> Panels:
    return [
        graph(
            "Preemptions",
            "Choices that lost their blocks. A few are normal when memory is full; many are thrash.",
            [Query(rate("inferd_preemptions_total", by="cause"), "{{cause}}")],
        ),
        graph(
            "Work lost to preemption",
            "Positions per second that have to be computed again.",
            [Query(rate("inferd_preempted_tokens_total", by="cause"), "{{cause}}")],
        ),
        graph(
            "Life of a block (median)",
            "Evicted long after its last use: the cache is large enough. Reused just before eviction: it is too small.",
            [
                Query(quantile(0.5, "inferd_kv_block_lifetime_seconds"), "lifetime"),
                Query(quantile(0.5, "inferd_kv_block_idle_before_evict_seconds"), "idle before eviction"),
                Query(quantile(0.5, "inferd_kv_block_reuse_gap_seconds"), "between two uses"),
            ],
            unit="s",
        ),
        graph(
            "Speculation",
            "Draft tokens per second. Few accepted: drafting costs more than it brings.",
            [Query(rate("inferd_spec_tokens_total", by="outcome"), "{{outcome}}")],
        ),
        graph(
            "Draft tokens accepted (mean)",
            "Per verification.",
            [Query(mean("inferd_spec_accepted_length"), "accepted")],
        ),
    ]
