"""`inferd tune simulate` from its flags to its answer: which traffic, which questions, as JSON and as text.

Owns the traffic a command line describes and how an answer is written. Enter at `answered`, then `render`.
"""

from dataclasses import dataclass
from typing import Any

from autotune.objective import PRESETS, Targets
from autotune.whatif import ATTAINED, Calibration, against, ask, replicas
from autotune.workload import Job, Replay, Traffic, shapes, synthetic
from daemon.lab.recorded import jobs_of, served


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The flags. Of `rate`, `users`, `journal` and `trace` one says what arrives."""

    lengths: str
    arrival: str
    rate: float
    users: int
    journal: str
    trace: str
    times: float
    seconds: float
    seed: int
    purpose: str
    ttft: float
    inter_token: float
    replicas: bool

    @property
    def targets(self) -> Targets:
        preset = PRESETS[self.purpose].targets if self.purpose else Targets()
        return Targets(ttft_s=self.ttft or preset.ttft_s, inter_token_s=self.inter_token or preset.inter_token_s)


def answered(question: Question, calibration: Calibration) -> dict[str, Any]:
    """The report. Raises ConfigError for a journal or trace that cannot be used."""
    records = served(question.journal) if question.journal else []
    jobs = shapes(records) if records else jobs_of(question.trace) if question.trace else []
    targets = question.targets
    report: dict[str, Any] = {
        "calibration": {"source": calibration.source, "step_cost_error": round(calibration.error, 4)},
        "targets": {"ttft_s": targets.ttft_s, "inter_token_s": targets.inter_token_s},
        "load": _load(question, jobs),
    }
    if question.replicas:
        jobs = jobs or list(_synthetic(question, calibration, 1.0).arrivals())
        report["replicas"] = replicas(calibration, jobs, times=question.times, targets=targets)
        return report
    rows = []
    for times in sorted({1.0, question.times}):
        seconds = jobs[-1].at_s / times + 1e-3 if jobs else question.seconds
        traffic: Traffic = Replay(jobs, times) if jobs else _synthetic(question, calibration, times)
        rows.append({"times": times, **ask(calibration, traffic, seconds=seconds, targets=targets, seed=question.seed)})
    report["runs"] = rows
    if records:
        report["against_live"] = against(rows[0], records, targets)
    return report


def _synthetic(question: Question, calibration: Calibration, times: float) -> Traffic:
    users = round(question.users * times)
    return synthetic(
        question.lengths,
        seed=question.seed,
        arrival=question.arrival,
        rate=question.rate * times,
        users=users,
        until_s=question.seconds,
        longest=calibration.resolved.max_model_len,
    )


def _load(question: Question, jobs: list[Job]) -> str:
    if jobs:
        where = question.journal or question.trace
        return f"{len(jobs)} requests of {where} over {jobs[-1].at_s:.0f} s"
    how = f"{question.rate:g}/s {question.arrival}" if question.rate else f"{question.users} users in a closed loop"
    return f"{question.lengths}, {how}, for {question.seconds:g} s, seed {question.seed}"


def render(report: dict[str, Any]) -> str:
    """The answer as text."""
    known, targets = report["calibration"], report["targets"]
    named = (("time to first token", targets["ttft_s"]), ("inter-token", targets["inter_token_s"]))
    wanted = [f"{name} p95 ≤ {value:g} s" for name, value in named if value]
    lines = [
        f"Load: {report['load']}",
        f"Calibrated by {known['source']}; a step is predicted to {known['step_cost_error']:.1%} on average.",
        "Targets: " + (", ".join(wanted) or "none: throughput alone"),
    ]
    for row in report.get("runs", ()):
        lines += ["", f"At {row['times']:g} x the load:", *_figures(row)]
    for row in report.get("replicas", ()):
        count, verdict = row["replicas"], "enough" if row["enough"] else f"too few: under {ATTAINED:.0%} count"
        lines += ["", f"With {count} replica{'s' if count > 1 else ''} ({verdict}), each of them:", *_figures(row)]
    if "against_live" in report:
        lines += ["", "Against what was recorded:"]
        for name, pair in report["against_live"].items():
            simulated, live, error = pair["simulated"], pair["live"], pair["error"]
            lines.append(f"  {name:<22} simulated {simulated:>10.3f}   live {live:>10.3f}   off by {error:.0%}")
    return "\n".join(lines)


_SECONDS = ("ttft_p50", "ttft_p95", "inter_token_p50", "inter_token_p95", "latency_p95")


def _figures(row: dict[str, Any]) -> list[str]:
    first_p50, first_p95, gap_p50, gap_p95, whole_p95 = (
        "-" if row[name] is None else f"{row[name]:.3f} s" for name in _SECONDS
    )
    return [
        f"  {row['offered']} requests offered, {row['finished']} served, {row['shed']} turned away; "
        f"{row['attained']:.1%} met every target, whole",
        f"  goodput {row['goodput']:.1f} of {row['output_tokens_per_s']:.1f} output tokens/s; "
        f"busy {row['utilisation']:.0%}",
        f"  time to first token p50 {first_p50}, p95 {first_p95}; inter-token p50 {gap_p50}, p95 {gap_p95}; "
        f"whole p95 {whole_p95}",
        f"  {row['preemptions']} preemptions; at most {row['kv_peak_blocks']} KV blocks active, above the watermark "
        f"{row['over_watermark_share']:.1%} of the busy time",
    ]
