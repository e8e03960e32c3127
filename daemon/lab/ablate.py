"""`inferd bench ablate`: every optimisation off alone, on alone, and against all on, each on a daemon of its own.

Owns the order of runs (interleaved: every side once, then every side again, so that a machine that changes its mind
changes it for all) and what follows from them. The table of features is features.py's. Enter at `ablated`, then
`render`.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Final

import click

from daemon.lab import features, record, stats
from daemon.lab.gather import better, run_of
from daemon.lab.mixture import mixture
from daemon.lab.record import Effect, Report, Run
from daemon.lab.side import Side, SideFailed, serving
from daemon.lab.watch import Watch
from daemon.load.client import connect
from daemon.load.drive import Drive
from daemon.load.workload import Workload

FIGURES: Final = (
    *("output_tokens_per_s", "ttft_p50_s", "ttft_p95_s", "inter_token_p50_s", "inter_token_p95_s"),
    *("same_answers", "peak_in_use_bytes", "peak_kv_active_bytes", "peak_activations_bytes", "peak_engine_bytes"),
)
_WARM_UP = 2  # requests that are not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """The flags."""

    model: str
    features: tuple[str, ...]
    alone: bool
    requests: int
    concurrency: int
    repeats: int
    seed: int
    longest: int
    rows: int
    memory_limit: str

    @property
    def base(self) -> dict[str, Any]:
        """What every side has in common. The tuner would change what is to be held still."""
        limit = {"memory_limit": self.memory_limit} if self.memory_limit else {}
        return {"tuner": False, "max_model_len": self.longest, "max_num_seqs": self.rows, **limit}


def ablated(asked: Ablation) -> Report:
    """Run it. Raises SideFailed if the side with all features cannot be started."""
    started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    sides = features.sides(features.chosen(asked.features), asked.alone, asked.base)
    runs: list[Run] = []
    failed: dict[str, str] = {}
    versions: dict[str, str] = {}
    answers: dict[int, dict[int, int]] = {}  # repetition → request → answer, of the side with all features
    total = len(sides) * asked.repeats
    for repeat in range(asked.repeats):
        for number, (side, settings) in enumerate(sides.items(), 1 + repeat * len(sides)):
            click.echo(f"[{number}/{total}] {side}, repetition {repeat + 1}: ", err=True, nl=False)
            if side in failed:
                click.echo("left out", err=True)
                continue
            try:
                with serving(asked.model, settings) as served:
                    run, versions, given = asyncio.run(measured(asked, served, side, settings, repeat))
            except SideFailed as error:
                click.echo(error.message if side != features.ALL_ON else "", err=True)
                if side == features.ALL_ON:
                    raise
                failed[side] = error.message
                continue
            expected = answers.setdefault(repeat, given)
            same = sum(expected.get(index) == answer for index, answer in given.items()) / max(1, len(expected))
            runs.append(record.with_figures(run, same_answers=round(same, 4)))
            click.echo(f"{run.figures['output_tokens_per_s']:.1f} output tokens/s in {run.seconds:.1f} s", err=True)
    made = Report(
        kind="ablation",
        title=f"Ablation: {asked.requests} requests, {asked.concurrency} at a time, {asked.repeats} repetitions",
        started_at=started_at,
        model=asked.model,
        settings=asked.base,
        versions=versions,
        seeds=tuple(range(asked.seed, asked.seed + asked.repeats)),
        machine=record.machine(),
        runs=tuple(runs),
        notes=(
            *(f"{side} could not be started: {why}" for side, why in failed.items()),
            *(f"{feature.name} off: {feature.instead}" for feature in features.chosen(asked.features)),
        ),
    )
    return record.changed(made, effects=effects(made))


async def measured(
    asked: Ablation, served: Side, side: str, settings: dict[str, Any], repeat: int
) -> tuple[Run, dict[str, str], dict[int, int]]:
    """One run, the server's versions, and a checksum of each answer. Every side of a repetition gets the same
    requests, and decodes greedily: answers that differ are a loss of quality."""
    seed = asked.seed + repeat
    async with connect(served.url, connections=asked.concurrency) as client:
        client.ignore_eos = True  # else a model that has little to say makes all answers alike
        sizer = await client.prepare()
        for index in range(_WARM_UP):
            await client.ask(Workload(mixture(asked.longest), -1 - seed, sizer).request(index), time.perf_counter())
        drive = Drive(Workload(mixture(asked.longest), seed, sizer), client.ask)
        async with Watch(served.endpoint, every_s=0.25) as watch:
            await drive.closed(asked.concurrency, asked.requests)
    run = run_of(
        drive.samples,
        drive.began_s,
        drive.ended_s,
        side=side,
        watch=watch,
        repeat=repeat,
        seed=seed,
        settings={name: value for name, value in settings.items() if name not in asked.base and value != ()},
    )
    return run, watch.versions, {sample.index: sample.answer for sample in drive.samples if not sample.error}


def effects(report: Report, figures: tuple[str, ...] = FIGURES) -> tuple[Effect, ...]:
    """Each side against the one it belongs to, by pairs of the same repetition where both have all of them."""
    found = []
    for side in report.sides:
        other = features.against(side)
        if side in (other, features.ALL_ON) or other not in report.sides:
            continue
        for figure in figures:
            ratio = stats.ratio(report.values(side, figure), report.values(other, figure), paired=True)
            if ratio:
                found.append(
                    Effect(
                        figure=figure,
                        side=side,
                        against=other,
                        ratio=round(ratio.middle, 4),
                        low=None if ratio.low is None else round(ratio.low, 4),
                        high=None if ratio.high is None else round(ratio.high, 4),
                        noise=ratio.noise,
                    )
                )
    return tuple(found)


_COLUMNS: Final = {
    "output_tokens_per_s": "tokens/s",
    "ttft_p95_s": "ttft p95",
    "inter_token_p95_s": "gap p95",
    "same_answers": "same answers",
    "peak_in_use_bytes": "in use",
    "peak_engine_bytes": "resident",
}


def render(report: Report) -> str:
    """For a person: ratios, with what is not significant in brackets."""
    lines = [f"{report.model} · {report.title}", ""]
    for other in dict.fromkeys(effect.against for effect in report.effects):
        lines.append(f"{f'× {other}':<28}" + "".join(f"{title:>18}" for title in _COLUMNS.values()))
        for side in dict.fromkeys(e.side for e in report.effects if e.against == other):
            by_figure = {e.figure: e for e in report.effects if e.side == side}
            lines.append(f"{side:<28}" + "".join(f"{_cell(by_figure.get(figure)):>18}" for figure in _COLUMNS))
        lines.append("")
    lines += report.notes
    lines.append("(in brackets: not significant at 95 %; !: worse, +: better; one repetition says nothing about noise)")
    return "\n".join(lines)


def _cell(effect: Effect | None) -> str:
    if effect is None:
        return "–"
    if effect.noise is not False or effect.low is None or effect.high is None:
        return f"({effect.ratio:.2f})"
    sign = "+" if better(effect.figure, effect.ratio) else "!"
    return f"{sign} {effect.ratio:.2f} ±{(effect.high - effect.low) / 2:.2f}"
