"""Panels: what the overview, the header and `top --once` say, as lines drawn from the view.

Pure; shared by the screens and the plain report. It must not know Textual. Enter at `header`, `overview`.
"""

from typing import Final

from telemetry import events
from telemetry.events import SEVERITIES, STAGES, Finding
from telemetry.parts import Percentiles
from tui.text import (
    NOT_REPORTED,
    UNKNOWN,
    Line,
    Span,
    age,
    beside,
    clock,
    count,
    duration,
    fit,
    line,
    pad,
    percent,
    rate,
    right,
    rule,
    size,
)
from tui.view import Note, View
from tui.widgets.ladder import ladder, legend, ordered, spare_names, stacked
from tui.widgets.spark import chart, spark

WIDE: Final = 120
_LEGEND: Final = 2  # lines of names under a bar
_LIVE_S: Final = 2.0  # younger than this needs no figure
_STALE_S: Final = 3.0  # older than this, what is shown is said to be old
_NO_PROGRESS_S: Final = 5.0
_LIVE: Final = (("ttft", "TTFT"), ("inter_token", "inter-token"), ("e2e", "end to end"))
_MARKS: Final = {"ready": ("●", "good"), "starting": ("◐", "info"), "draining": ("◐", "warning")}


def header(view: View, width: int) -> Line:
    """One line: who is watched, how it is, how old this is."""
    if view.error or (view.age_s or 0) > _STALE_S:
        return fit(_away(view), width)
    known = view.snapshot
    if known is None:
        return fit(line((" inferd ", "strong"), ("connecting…", "dim")), width)
    state, queue = known.state, known.queue
    name = (state.daemon if state else None) or NOT_REPORTED
    mark, style = _MARKS.get(name, ("▲", "warning"))
    since = f" {age(state.daemon_age_ns)}" if state and state.daemon_age_ns is not None else ""
    spans: list[str | Span] = [(" inferd ", "strong"), (f"{mark} {name}", style), f"{since}  "]
    found = known.findings or []
    if found:
        worst = max(found, key=lambda f: _severity(f.severity))
        spans += [(f"{len(found)} finding{'s' if len(found) > 1 else ''}", _style(worst.severity)), "  "]
    spans += _engine(view)
    spans.append(
        f"run {count(queue.running) if queue else UNKNOWN}  wait {count(queue.waiting) if queue else UNKNOWN}  "
    )
    kv = view.values("kv")
    spans.append(f"kv {percent(kv[-1] if kv else None)}  {known.model}")
    old_s = view.age_s or 0.0
    tail = f"{view.label} " if view.label else "live " if old_s < _LIVE_S else f"{old_s:.0f} s ago "
    left = fit(line(*spans), max(0, width - len(tail) - 1))
    return (*left, (f" {tail}", "dim"))


def _engine(view: View) -> list[str | Span]:
    state = view.snapshot.state if view.snapshot else None
    if state is None:
        return []
    spans: list[str | Span] = []
    if state.engine not in (None, "ready"):
        spans.append((f"engine {state.engine}  ", "warning"))
    if state.progress_age_ns is not None and state.progress_age_ns > _NO_PROGRESS_S * 1e9:
        spans.append((f"no progress for {age(state.progress_age_ns)}  ", "critical"))
    if state.restarts:
        spans.append((f"restarts {state.restarts}  ", "warning"))
    return spans


def _away(view: View) -> Line:
    """The daemon does not answer: since when, and what is shown meanwhile."""
    if view.fresh_ns is None or view.snapshot is None:
        return line((f" inferd ✗ {view.error}; retrying", "critical"))
    shown = view.snapshot.unix_seconds
    text = f" inferd ✗ no answer for {duration(view.age_s)}; shown is {clock(shown)} UTC; retrying"
    return line((text, "critical"), (f"  {view.error}", "warning"))


def overview(view: View, width: int, height: int) -> list[Line]:
    """Everything on one screen; a large one draws charts."""
    roomy = width >= WIDE and height >= 30
    lines = [
        *_limits(view, width),
        *(_charts(view, width, max(4, min(10, (height - 28) // 2))) if roomy else _latency(view, width)),
    ]
    lines += [*time_breakdown(view, width), *memory(view, width)]
    left = height - len(lines)
    return [*lines, *notes(view, width, left)] if left > 1 else lines


def _limits(view: View, width: int) -> list[Line]:
    limits = view.snapshot.limits if view.snapshot else None
    if limits is None:
        return [line((" limits  ", "label"), (NOT_REPORTED, "dim"))]
    parts = (
        f"{limits.max_num_seqs} seqs",
        f"{count(limits.max_num_batched_tokens)} tok",
        f"chunk {limits.prefill_chunk}",
        f"{limits.max_partial_prefills} partial",
        f"ctx {count(limits.context_limit)}",
        f"{count(limits.kv_blocks)} blocks",
        *([f"spec {limits.spec_depth}"] if limits.spec_depth else []),
    )
    return [line((" limits       ", "label"), " · ".join(parts))]


def _percentiles(view: View, name: str) -> Percentiles | None:
    latency = view.snapshot.latency if view.snapshot else None
    return getattr(latency, name) if latency else None


def _latency(view: View, width: int) -> list[Line]:
    """A row a figure: percentiles and the live line of its p95 (or of itself)."""
    room = max(0, width - 45)
    title = (" " * 13, ""), ("      p50       p95       p99  ", "label"), (pad(" last minutes, p95", room), "label")
    lines: list[Line] = [title]
    for name, label in _LIVE:
        found = _percentiles(view, name)
        figures = "".join(
            right(duration(getattr(found, point) if found else None), 10)
            for point in ("p50", "p95", "p99")
        )  # fmt: skip
        lines.append(
            line((pad(f" {label}", 13), "label"), figures[1:], "  ", (spark(view.values(f"{name}.p95"), room), "p95"))
        )
    return [*lines, *_rates(view, room), *_queue(view, room)]


def _rates(view: View, room: int) -> list[Line]:
    latency = view.snapshot.latency if view.snapshot else None
    out = latency.output_tokens_per_second if latency else None
    fill = latency.prefill_tokens_per_second if latency else None
    done = latency.requests_per_second if latency else None
    text = pad(f"{rate(out)} tok/s  prompt {rate(fill)}", 30)
    return [
        line((" output      ", "label"), text, ("", ""), (spark(view.values("output_tokens"), room), "p50")),
        line((" requests    ", "label"), pad(f"{rate(done)} /s", 30), (spark(view.values("requests"), room), "p50")),
    ]


def _queue(view: View, room: int) -> list[Line]:
    queue = view.snapshot.queue if view.snapshot else None
    if queue is None:
        return [line((" queue       ", "label"), (NOT_REPORTED, "dim"))]
    text = f"{count(queue.running)} run  {count(queue.waiting)} wait  {count(queue.preempted)} preempted"
    return [
        line((" queue       ", "label"), pad(text, 30), (spark(view.values("waiting"), room), "p99")),
        *([line((" " * 13, ""), (_why(queue), "warning"))] if queue.waiting else []),
    ]


def _why(queue: "object") -> str:
    reasons = {name: getattr(queue, f"waiting_{name}") for name in events.WAITING_REASONS}
    said = ", ".join(f"{count(number)} for {name}" for name, number in reasons.items() if number)
    return f"waiting: {said}" if said else "waiting: not looked at yet"


def _charts(view: View, width: int, height: int) -> list[Line]:
    half = (width - 2) // 2
    points = ("p50", "p95", "p99")
    pairs = []
    for name, label in (("ttft", "TTFT"), ("inter_token", "Inter-token")):
        found = _percentiles(view, name)
        note = "  ".join(f"{point} {duration(getattr(found, point) if found else None)}" for point in points)
        drawn = chart([(view.values(f"{name}.{point}"), point) for point in points], half, height, duration)
        pairs.append([rule(label, half, note), *drawn])
    latency, queue = (view.snapshot.latency, view.snapshot.queue) if view.snapshot else (None, None)
    out = latency.output_tokens_per_second if latency else None
    fill = latency.prefill_tokens_per_second if latency else None
    pairs.append(
        [
            rule("Throughput", half, f"output {rate(out)} tok/s  prompt {rate(fill)} tok/s"),
            *chart([(view.values("prefill_tokens"), "p99"), (view.values("output_tokens"), "p50")], half, height, rate),
        ]
    )
    waiting = f"run {count(queue.running)}  wait {count(queue.waiting)}" if queue else NOT_REPORTED
    pairs.append(
        [
            rule("Queue", half, waiting),
            *chart([(view.values("running"), "p50"), (view.values("waiting"), "p99")], half, height, count),
        ]
    )
    why = [line(" ", (_why(queue), "warning"))] if queue and queue.waiting else []
    return [*beside(pairs[0], pairs[1], half), *beside(pairs[2], pairs[3], half), *why]


def time_breakdown(view: View, width: int) -> list[Line]:
    """Where the time of the requests that ended in the last minute went."""
    found = view.snapshot.time_breakdown if view.snapshot else None
    if found is None:
        return [rule("Time by stage", width, NOT_REPORTED)]
    stages = {name: found.stages.get(name, 0.0) for name in STAGES}
    title = rule("Time by stage", width, f"requests that ended in the last {found.window_seconds} s")
    if not any(stages.values()):
        return [title, line((" no request ended in that time", "dim"))]
    return [title, line(" ", *stacked(stages, width - 2)), *legend(stages, width, percent)[:_LEGEND]]


def memory(view: View, width: int) -> list[Line]:
    """The memory ladder with watermark and hard line."""
    found = view.snapshot.memory if view.snapshot else None
    if found is None or found.owners is None:
        return [rule("Memory", width, NOT_REPORTED)]
    used, limit = found.used_bytes, found.limit_bytes
    share = f" of {size(limit)} ({percent(used / limit)})" if limit and used is not None else ""
    source = " as planned" if found.source == "plan" else ""
    title = rule("Memory", width, f"in use {size(used)}{share}{source}")
    amounts = ordered(found.owners)
    shown = legend(amounts, width, lambda value: size(int(value)), spare_names())
    return [title, *ladder(found.owners, width, limit), *shown[:_LEGEND]]


def notes(view: View, width: int, height: int) -> list[Line]:
    """What holds now, worst first; then what happened, newest first."""
    found = sorted(
        (view.snapshot.findings or []) if view.snapshot else [], key=lambda f: (-_severity(f.severity), -f.at_ns)
    )
    lines = [rule("Findings and decisions", width)]
    for finding in found:
        lines.append(note_line(view, finding, width))
        lines.append(line((" " * 10, ""), (f"→ {finding.next_step}", "key")))
    past = (n for n in reversed(view.notes) if not (isinstance(n, Finding) and n.active))
    lines += [note_line(view, note, width) for note in past]
    if len(lines) == 1:
        lines.append(line((" nothing to report", "dim")))
    return lines[:height]


def note_line(view: View, note: Note, width: int) -> Line:
    """Time, kind, and what was said."""
    at = clock(view.unix(note.at_ns))
    kind, text, style = _said(note)
    return fit(line(f" {at} ", (f" {kind} ", style), f" {text}"), width)


def _said(note: Note) -> tuple[str, str, str]:
    """(kind, text, style)"""
    match note:
        case Finding():
            if not note.active:
                return "over", f"{note.runbook}: no longer found", "dim"
            return note.severity, f"{note.runbook}: {note.summary}", _style(note.severity)
        case events.Incident():
            return "incident", f"{note.kind} ({note.cause}): {note.summary}", "critical"
        case events.Decision():
            verdict = f", {note.verdict}" if note.verdict else ""
            return "tuner", f"{note.rule}: {note.knob} {note.before} → {note.after}{verdict}", "info"
        case events.EngineEnded():
            return "engine", f"ended, {note.cause}: {note.detail}", "dim" if note.cause == "drained" else "critical"
        case events.StateChanged():
            why = f": {note.why}" if note.why else ""
            return "state", f"{note.state}{why}", "info" if note.state == "ready" else "warning"


def _severity(name: str) -> int:
    return SEVERITIES.index(name) if name in SEVERITIES else 0


def _style(severity: str) -> str:
    return severity if severity in SEVERITIES else "info"
