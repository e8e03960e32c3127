"""What a load test found: figures out of samples, as one JSON value and as text. Pure.

Owns the definitions of the figures. It must not send anything or read a clock. Enter at `summarize`, then `render`.

Definitions, all in seconds: TTFT = first chunk with text − headers sent; inter-token = gap between two chunks with text
(a server that merges tokens into a chunk shows `tokens_per_chunk` > 1); per output token = (last − first chunk) ÷
(tokens − 1); end to end = end of stream − headers sent; client wait = headers sent − due, which no server is charged
for. Percentiles are interpolated linearly between ranks, over successful requests only.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from daemon.load.client import Sample

PERCENTILES = (50, 95, 99)
_MOST_ROWS = 30  # of the time line, as text


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was asked for, and the samples."""

    about: dict[str, Any]  # url, model, scenario, seed, how it was driven, how prompts were sized
    samples: Sequence[Sample]
    unfinished: int
    began_s: float
    ended_s: float
    lag_s: Sequence[float]
    interrupted: bool


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between ranks; values need not be sorted. Raises ValueError for none."""
    if not values:
        raise ValueError("no values")
    ranked = sorted(values)
    at = (len(ranked) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (at - low)


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Count, mean, percentiles and maximum; only the count where there is nothing."""
    if not values:
        return {"count": 0}
    figures = {f"p{p}": round(percentile(values, p), 6) for p in PERCENTILES}
    return {"count": len(values), "mean": round(sum(values) / len(values), 6), **figures, "max": round(max(values), 6)}


def latencies(samples: Sequence[Sample]) -> dict[str, dict[str, float | int]]:
    """The four latencies over successful samples."""
    gaps = [b - a for s in samples for a, b in pairwise(s.chunks_s)]
    per_token = [
        (s.chunks_s[-1] - s.chunks_s[0]) / (s.output_tokens - 1)
        for s in samples
        if len(s.chunks_s) > 1 and s.output_tokens > 1
    ]
    return {
        "ttft": spread([s.chunks_s[0] - s.sent_s for s in samples if s.chunks_s]),
        "inter_token": spread(gaps),
        "per_output_token": spread(per_token),
        "end_to_end": spread([s.ended_s - s.sent_s for s in samples]),
    }


def timeline(run: Run) -> list[dict[str, Any]]:
    """One row a second: what started, got its first token, ended and failed in it, tokens and requests under way."""
    seconds = max(1, int(run.ended_s - run.began_s) + 1)
    rows = [{"second": i, "sent": 0, "finished": 0, "failed": 0, "running": 0, "tokens": 0.0} for i in range(seconds)]
    first: list[list[float]] = [[] for _ in rows]

    def row(at_s: float) -> int:
        return min(seconds - 1, max(0, int(at_s - run.began_s)))

    for sample in run.samples:
        rows[row(sample.sent_s)]["sent"] += 1
        rows[row(sample.ended_s)]["failed" if sample.error else "finished"] += 1
        for i in range(row(sample.sent_s), row(sample.ended_s) + 1):
            rows[i]["running"] += 1
        if sample.chunks_s:
            first[row(sample.chunks_s[0])].append(sample.chunks_s[0] - sample.sent_s)
            tokens = (sample.output_tokens or len(sample.chunks_s)) / len(sample.chunks_s)
            for at in sample.chunks_s:
                rows[row(at)]["tokens"] += tokens
    return [
        {**r, "tokens": round(r["tokens"], 1), "ttft_p95": round(percentile(f, 95), 4) if f else None}
        for r, f in zip(rows, first, strict=True)
    ]


def summarize(run: Run) -> dict[str, Any]:
    """The whole report as JSON-ready values."""
    good = [s for s in run.samples if not s.error]
    wall = max(run.ended_s - run.began_s, 1e-9)
    output = sum(s.output_tokens for s in good)
    chunks = sum(len(s.chunks_s) for s in good)
    kinds = sorted({s.kind for s in good})
    return {
        **run.about,
        "interrupted": run.interrupted,
        "duration_s": round(wall, 3),
        "requests": {"ok": len(good), "failed": len(run.samples) - len(good), "unfinished": run.unfinished},
        "errors": dict(Counter(s.error for s in run.samples if s.error).most_common()),
        "finish_reasons": dict(Counter(s.finish_reason or "none" for s in good).most_common()),
        "tokens": {
            "counted_by": "usage" if good and all(s.counted for s in good) else "chunks",
            "prompt_aimed": sum(s.prompt_tokens_aimed for s in good),
            "prompt": sum(s.prompt_tokens for s in good),
            "prompt_cached": sum(s.cached_tokens for s in good),
            "output": output,
            "per_chunk": round(output / chunks, 3) if chunks else None,
        },
        "rates": {
            "output_tokens_per_s": round(output / wall, 2),
            "prompt_tokens_per_s": round(sum(s.prompt_tokens for s in good) / wall, 2),
            "requests_per_s": round(len(good) / wall, 3),
        },
        "latency_s": latencies(good),
        "latency_by_kind_s": {k: latencies([s for s in good if s.kind == k]) for k in kinds} if len(kinds) > 1 else {},
        "client_s": {
            "wait": spread([s.sent_s - s.due_s for s in good]),
            "connection": spread([s.pooled_s for s in good]),
            "loop_lag": spread(run.lag_s),
        },
        "timeline": timeline(run),
    }


def _row(name: str, figures: dict[str, Any]) -> str:
    if not figures["count"]:
        return f"  {name:<20}{'–':>10}"
    return f"  {name:<20}" + "".join(f"{figures[k] * 1000:>10.1f}" for k in ("p50", "p95", "p99", "max"))


def _latency_rows(title: str, table: dict[str, dict[str, Any]]) -> list[str]:
    head = f"{title + ' (ms)':<22}" + "".join(f"{k:>10}" for k in ("p50", "p95", "p99", "max"))
    names = {
        "ttft": "first token",
        "inter_token": "between tokens",
        "per_output_token": "per output token",
        "end_to_end": "end to end",
        "wait": "before sending",
        "connection": "of it, connecting",
        "loop_lag": "event loop late",
    }
    return [head, *(_row(names[name], figures) for name, figures in table.items())]


def warnings(report: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the figures."""
    notes = []
    tokens, client = report["tokens"], report["client_s"]
    if tokens["counted_by"] == "chunks" and report["requests"]["ok"]:
        notes.append("the server reports no usage: output tokens are counted as chunks")
    if report["prompt_sizes"] == "words":
        notes.append("the server has no /tokenize: prompt lengths are words, not tokens")
    if (tokens["per_chunk"] or 0) > 1.05:
        notes.append(f"{tokens['per_chunk']} tokens a chunk: 'between tokens' is between chunks")
    if tokens["prompt_cached"] > tokens["prompt"] * 0.5:  # a chat template and the opening are shared, so never none
        notes.append("over half of the prompt tokens came from the prefix cache; use another --seed to avoid that")
    if client["loop_lag"].get("p99", 0) > 0.05:
        notes.append("this client's own event loop was late: its figures are worse than the server's")
    if client["wait"].get("p95", 0) > 0.1:
        notes.append("requests waited in this client before they were sent; the server is not charged for that")
    return notes


def render(report: dict[str, Any]) -> str:
    """The report for a person."""
    r, tokens, rates = report["requests"], report["tokens"], report["rates"]
    failed = ", ".join(f"{kind} × {n}" for kind, n in report["errors"].items())
    lines = [
        f"{report['model']} at {report['url']} · {report['scenario']} · {report['load']} · seed {report['seed']}",
        f"{r['ok']} ok, {r['failed']} failed{f' ({failed})' if failed else ''}, {r['unfinished']} unfinished"
        f" in {report['duration_s']:.1f} s{' · interrupted' if report['interrupted'] else ''}",
        f"{rates['output_tokens_per_s']:.1f} output tokens/s · {rates['prompt_tokens_per_s']:.1f} prompt tokens/s"
        f" · {rates['requests_per_s']:.2f} requests/s",
        f"{tokens['output']} output tokens (by {tokens['counted_by']}), {tokens['prompt']} prompt tokens"
        f" ({tokens['prompt_aimed']} aimed at, the chat template comes on top; {tokens['prompt_cached']} cached)",
        "",
        *_latency_rows("server", report["latency_s"]),
    ]
    for kind, table in report["latency_by_kind_s"].items():
        lines += ["", *_latency_rows(f"server, {kind}", table)]
    lines += ["", *_latency_rows("client", report["client_s"]), "", *_timeline_rows(report["timeline"])]
    return "\n".join([*lines, *(f"note: {note}" for note in warnings(report))])


def _timeline_rows(rows: list[dict[str, Any]]) -> list[str]:
    """The time line, thinned to a screenful by merging seconds."""
    step = -(-len(rows) // _MOST_ROWS)
    lines = [f"{'second':>8}{'sent':>8}{'done':>8}{'failed':>8}{'running':>9}{'tokens/s':>10}{'ttft p95':>10}"]
    for i in range(0, len(rows), step):
        part = rows[i : i + step]
        slowest = max((r["ttft_p95"] for r in part if r["ttft_p95"] is not None), default=None)
        lines.append(
            f"{i:>8}{sum(r['sent'] for r in part):>8}{sum(r['finished'] for r in part):>8}"
            f"{sum(r['failed'] for r in part):>8}{max(r['running'] for r in part):>9}"
            f"{sum(r['tokens'] for r in part) / len(part):>10.1f}"
            f"{'–' if slowest is None else f'{slowest * 1000:.0f} ms':>10}"
        )
    return lines
