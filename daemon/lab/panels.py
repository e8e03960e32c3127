"""Which plots a run gets: latencies, rates, the memory ladder, queue, blocks, limits with decisions, distributions.

Owns the choice and the units; geometry is daemon/lab/svg.py's. Pure. Enter at `of_run` and `of_sides`.
"""

from collections.abc import Sequence
from typing import Final

from daemon.lab import svg
from daemon.lab.record import Report, Run, Series
from daemon.load.report import percentile
from engine.budget import readable as _readable

MOST_WHOLE_RUNS: Final = 6  # of more, sides are laid over each other instead
# From the bottom of the ladder up, as telemetry/ladder.py counts them.
_LADDER: Final = (
    *("weights", "runtime", "workspace", "activations", "unbooked", "kv_active", "kv_cached", "kv_free"),
    *("allocator_cache", "draft", "graphs", "neighbours"),
)
_WATERMARK, _HARD_LINE = 0.70, 0.85  # of the limit, as autotune/space.py has them
_BINS: Final = 60

Plot = tuple[str, str]  # caption, drawing


def readable(amount: float) -> str:
    return _readable(round(amount))


def seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def of_run(run: Run) -> list[Plot]:
    """Every plot of one run; empty drawings are for figures that nobody reported."""
    marks = [svg.Mark(m.at_s, f"{m.label}. {m.detail}".rstrip(". ")) for m in run.marks]
    kinds = list(dict.fromkeys(request.kind for request in run.requests))
    return [
        ("Time to first token", svg.lines("time to first token", _latency(run, "ttft_s"), marks, seconds)),
        ("Mean gap between a request's tokens", svg.lines("inter-token", _latency(run, "gap_s"), marks, seconds)),
        ("Memory over time", _ladder(run, marks)),
        ("Tokens a second", _group(run, "rate", marks)),
        ("Requests in the engine", _group(run, "queue", marks, limit="limits.max_num_seqs")),
        ("KV blocks", _group(run, "kv", marks, limit="limits.kv_blocks", only=("active", "cached"))),
        ("Limits on tokens a step, with decisions", _limits(run, marks)),
        ("Resident bytes by process", _group(run, "process", marks, form=readable)),
        ("Distribution of the time to first token", _ttfts(run)),
        ("Distribution of the gaps between tokens", _gaps(run)),
        (
            "Latency against answer length",
            svg.cloud(
                "latency against answer length",
                {
                    kind: [(r.output_tokens, r.whole_s) for r in run.requests if r.kind == kind and not r.error]
                    for kind in kinds
                },
                seconds,
                "output tokens",
            ),
        ),
    ]


def of_sides(report: Report) -> list[Plot]:
    """One line a side: of its first run."""
    first = [report.of(side)[0] for side in report.sides]

    def over(name: str) -> list[svg.Line]:
        return [svg.Line(name=run.side, points=_points(_series(run, name))) for run in first]

    return [
        ("Memory in use over time", svg.lines("memory in use", over("memory.in use"), form=readable)),
        ("Active KV over time", svg.lines("active KV", over("memory.kv_active"), form=readable)),
        ("Resident bytes of the engine", svg.lines("engine", over("process.engine"), form=readable)),
        ("Output tokens a second", svg.lines("decode", over("rate.decode"))),
        ("Running", svg.lines("running", over("queue.running"))),
        ("Waiting", svg.lines("waiting", over("queue.waiting"))),
    ]


def of_search(report: Report) -> list[Plot]:
    """Each figure over the trials, in their order."""
    shown = {
        "output_tokens_per_s": ("Output tokens a second", svg.plain),
        "ttft_p95_s": ("Time to first token, p95", seconds),
        "inter_token_p95_s": ("Gap between tokens, p95", seconds),
        "peak_in_use_bytes": ("Most memory in use", readable),
    }
    groups = {
        "whole": [(n, run) for n, run in enumerate(report.runs) if not run.notes],
        "stopped early": [(n, run) for n, run in enumerate(report.runs) if "stopped early" in run.notes],
    }
    return [
        (
            title,
            svg.cloud(
                title,
                {
                    name: [(float(n), run.figures[figure]) for n, run in group if figure in run.figures]
                    for name, group in groups.items()
                    if group
                },
                form,
                "trial",
            ),
        )
        for figure, (title, form) in shown.items()
    ]


def binned(run: Run, figure: str, share: float, kind: str = "", bins: int = _BINS) -> list[tuple[float, float]]:
    """A percentile (`share` of 100) of a request's figure by the time it was sent; bins without any are left out."""
    width = max(run.seconds / bins, 1e-6)
    cells: dict[int, list[float]] = {}
    for request in run.requests:
        value = getattr(request, figure)
        if value is not None and not request.error and (not kind or request.kind == kind):
            cells.setdefault(int(request.at_s / width), []).append(value)
    return [((cell + 0.5) * width, percentile(values, share)) for cell, values in sorted(cells.items())]


def _latency(run: Run, figure: str) -> list[svg.Line]:
    kinds = sorted({request.kind for request in run.requests})
    drawn = [svg.Line(name=f"{kind} p50", points=binned(run, figure, 50, kind)) for kind in kinds]
    return drawn + [svg.Line(name=f"{kind} p95", points=binned(run, figure, 95, kind)) for kind in kinds]


def _series(run: Run, name: str) -> Series | None:
    return next((series for series in run.series if series.name == name), None)


def _points(series: Series | None) -> list[tuple[float, float | None]]:
    return list(zip(series.at_s, series.values, strict=True)) if series else []


def _group(
    run: Run,
    group: str,
    marks: Sequence[svg.Mark],
    limit: str = "",
    only: tuple[str, ...] = (),
    form: svg.Form = svg.plain,
) -> str:
    drawn = [
        svg.Line(name=series.name.partition(".")[2], points=_points(series))
        for series in run.series
        if series.name.startswith(f"{group}.") and (not only or series.name.partition(".")[2] in only)
    ]
    bound = _series(run, limit) if limit and drawn else None
    if bound:
        drawn.append(svg.Line(name=f"limit {limit.partition('.')[2]}", points=_points(bound), step=True, dashed=True))
    return svg.lines(group, drawn, marks, form)


def _limits(run: Run, marks: Sequence[svg.Mark]) -> str:
    names = ("max_num_batched_tokens", "prefill_chunk", "max_num_seqs", "max_partial_prefills")
    drawn = [svg.Line(name=name, points=_points(_series(run, f"limits.{name}")), step=True) for name in names]
    return svg.lines("limits", drawn, marks)


def _ladder(run: Run, marks: Sequence[svg.Mark]) -> str:
    layers = [
        svg.Line(name=owner, points=_every([(x, y or 0.0) for x, y in _points(series)]))
        for owner in _LADDER
        if (series := _series(run, f"memory.{owner}")) is not None
    ]
    if not layers or not layers[0].points:
        return ""
    bounds = []
    if run.limit_bytes:
        lines = {"limit": 1.0, "hard line": _HARD_LINE, "watermark": _WATERMARK}
        ends = (layers[0].points[0][0], layers[0].points[-1][0])
        bounds = [
            svg.Line(name=name, points=[(x, run.limit_bytes * share) for x in ends]) for name, share in lines.items()
        ]
    drawn = svg.stack("memory", layers, bounds, marks, readable)
    known = [y for _, y in _points(_series(run, "memory.in use")) if y is not None]
    if not drawn or not known or not run.limit_bytes:
        return drawn
    most = max(known)
    said = f"In use at most {readable(most)}: {most / run.limit_bytes:.0%} of {readable(run.limit_bytes)}."
    return f'{drawn}<p class="why">{said} Dashed: watermark 70 %, hard line 85 %, limit.</p>'


def _every(points: svg.Points, most: int = 600) -> svg.Points:
    """Every n-th point: the layers of a stack need the same ones."""
    return points[:: -(-len(points) // most) or 1]


def _ttfts(run: Run) -> str:
    values = sorted(r.ttft_s for r in run.requests if r.ttft_s is not None and not r.error)
    if not values:
        return ""
    width = (values[-1] - values[0]) / 30 or values[-1] / 30 or 1e-3
    counts: dict[int, int] = {}
    for value in values:
        cell = min(29, int((value - values[0]) / width))
        counts[cell] = counts.get(cell, 0) + 1
    edges = [(values[0] + (cell + 1) * width, float(counts.get(cell, 0))) for cell in range(max(counts) + 1)]
    return svg.bars("time to first token", edges, seconds, "requests by seconds")


def _gaps(run: Run) -> str:
    edges = [(float(edge), float(count)) for edge, count in run.gaps.items()]
    return svg.bars("gaps between tokens", edges, seconds, "gaps by seconds, logarithmic")
