"""Turns what a load client saw into a record: requests on the run's clock, gaps, and flat figures.

Owns the names of the figures. Their definitions are daemon/load/report.py's. Pure. Enter at `run_of`.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from daemon.lab.record import Request, Run
from daemon.lab.watch import Watch
from daemon.load.client import Sample
from daemon.load.report import latencies, percentile

# Upper edges of the gaps' buckets, in seconds: eight a decade, from 0.1 ms to 100 s.
_EDGES: Final = tuple(round(10 ** (power / 8), 6) for power in range(-32, 17))
# Figures of which less is better; of all others more is.
LESS_IS_BETTER: Final = ("_s", "_bytes", "_share", "failed", "preemptions")
_PEAKS: Final = ("weights", "kv_active", "activations", "workspace", "runtime", "unbooked")


def better(figure: str, ratio: float) -> bool:
    """Whether a figure that grew by `ratio` got better."""
    less = figure.endswith(LESS_IS_BETTER) and not figure.endswith("per_s")
    return ratio < 1 if less else ratio > 1


def run_of(
    samples: Sequence[Sample],
    began_s: float,
    ended_s: float,
    *,
    side: str,
    watch: Watch | None = None,
    **about: Any,
) -> Run:
    """One run's record; `about` are further fields of it."""
    seen = [request_of(sample, began_s) for sample in samples]
    seconds = max(ended_s - began_s, 1e-9)
    figures = figures_of(samples, seconds)
    if watch:
        figures |= server_figures(watch)
        about.setdefault("limit_bytes", watch.limit_bytes)
    return Run(
        side=side,
        seconds=round(seconds, 3),
        figures=figures,
        series=watch.series if watch else (),
        marks=watch.marks if watch else (),
        requests=tuple(sorted(seen, key=lambda request: request.at_s)),
        gaps=gaps_of(samples),
        **about,
    )


def request_of(sample: Sample, began_s: float) -> Request:
    chunks = sample.chunks_s
    gaps = [b - a for a, b in pairwise(chunks)]
    return Request(
        at_s=round(sample.sent_s - began_s, 4),
        kind=sample.kind,
        prompt_tokens=sample.prompt_tokens or sample.prompt_tokens_aimed,
        output_tokens=sample.output_tokens,
        cached_tokens=sample.cached_tokens,
        ttft_s=round(chunks[0] - sample.sent_s, 5) if chunks else None,
        whole_s=round(sample.ended_s - sample.sent_s, 5),
        gap_s=round(sum(gaps) / len(gaps), 6) if gaps else None,
        longest_gap_s=round(max(gaps), 6) if gaps else None,
        error=sample.error,
    )


def gaps_of(samples: Sequence[Sample]) -> dict[str, int]:
    """Gaps between tokens by bucket."""
    found: Counter[float] = Counter()
    for sample in samples:
        for a, b in pairwise(sample.chunks_s):
            found[next((edge for edge in _EDGES if b - a <= edge), _EDGES[-1])] += 1
    return {f"{edge:g}": found[edge] for edge in sorted(found)}


def figures_of(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """From the client's side; of requests that went well, but for `failed`."""
    good = [sample for sample in samples if not sample.error]
    figures: dict[str, float] = {
        "output_tokens_per_s": round(sum(s.output_tokens for s in good) / seconds, 2),
        "prompt_tokens_per_s": round(sum(s.prompt_tokens for s in good) / seconds, 2),
        "requests_per_s": round(len(good) / seconds, 3),
        "requests": len(good),
        "output_tokens": sum(s.output_tokens for s in good),
        "prompt_tokens": sum(s.prompt_tokens for s in good),
        "cached_prompt_tokens": sum(s.cached_tokens for s in good),
        "failed": len(samples) - len(good),
    }
    for name, spread in latencies(good).items():
        figures |= {f"{name}_{point}_s": spread[point] for point in ("mean", "p50", "p95", "p99") if point in spread}
    return figures


def server_figures(watch: Watch) -> dict[str, float]:
    """From the server's own side: peaks of memory by owner, and what it counted itself."""
    figures: dict[str, float] = {}
    for series in watch.series:
        known = [value for value in series.values if value is not None]
        owner = series.name.removeprefix("memory.")
        if series.name == "memory.in use":
            figures["peak_in_use_bytes"] = max(known)
        elif owner in _PEAKS and owner != series.name:
            figures[f"peak_{owner}_bytes"] = max(known)
        elif series.name == "process.engine":
            figures["peak_engine_bytes"] = max(known)
        elif series.name == "rate.decode" and len(known) > 1:
            figures["server_decode_p50_per_s"] = round(percentile(known, 50), 2)
    before, after = (shot.totals if shot else None for shot in (watch.first, watch.last))
    if before and after:
        figures["server_requests"] = sum(after.finished.values()) - sum(before.finished.values())
        figures["server_output_tokens"] = after.output_tokens - before.output_tokens
        figures["server_prompt_tokens"] = after.prompt_tokens - before.prompt_tokens
        figures["preemptions"] = sum(after.preemptions.values()) - sum(before.preemptions.values())
    return figures
