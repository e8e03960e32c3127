"""One trial of a search: a daemon with these settings, the seeded load in parts, and how good that was.

Owns the objectives and the early end. It must not know what settings mean or which are tried next. Enter at `measured`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from autotune.objective import Targets
from autotune.workload import Synthetic
from daemon.lab.gather import run_of
from daemon.lab.mixture import mixture
from daemon.lab.record import Run, with_figures
from daemon.lab.side import Side, SideFailed, serving
from daemon.lab.watch import Watch
from daemon.load.client import Sample, connect
from daemon.load.drive import Drive
from daemon.load.workload import Workload

_PARTS = 4  # of a load; after each the trial may be given up


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The same for every trial."""

    requests: int
    concurrency: int
    longest: int
    seed: int
    ttft_s: float = 0.0  # targets of a request that counts for goodput; 0 = none
    inter_token_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A figure, and whether more of it is better."""

    figure: str
    most: bool
    unit: str

    def value(self, run: Run) -> float:
        """Requests that failed count against it. Raises SideFailed if none went well."""
        if self.figure not in run.figures or not run.figures["requests"]:
            raise SideFailed("no request succeeded")
        value = run.figures[self.figure]
        share = run.figures["requests"] / (run.figures["requests"] + run.figures["failed"])
        return value * share if self.most else value / share

    def said(self, value: float) -> str:
        return f"{value:.1f} {self.unit}" if self.most else f"{value:.3f} {self.unit}"


OBJECTIVES: Final = {
    "goodput": Objective(figure="goodput_tokens_per_s", most=True, unit="output tokens/s within the targets"),
    "throughput": Objective(figure="output_tokens_per_s", most=True, unit="output tokens/s"),
    "ttft": Objective(figure="ttft_p95_s", most=False, unit="s to the first token, p95"),
    "inter-token": Objective(figure="inter_token_p95_s", most=False, unit="s between tokens, p95"),
    "memory": Objective(figure="peak_in_use_bytes", most=False, unit="bytes in use at most"),
}


def measured(
    model: str, settings: dict[str, Any], load: Load, side: str, hopeless: Callable[[Run], bool]
) -> tuple[Run, dict[str, Any], dict[str, str]]:
    """The run, what the daemon resolved at start, and its versions. `hopeless` is asked after each part but the last;
    if it says so, the run ends with the note 'stopped early'. Raises SideFailed."""
    with serving(model, settings) as served:
        return asyncio.run(_measured(served, load, side, hopeless))


async def _measured(
    served: Side, load: Load, side: str, hopeless: Callable[[Run], bool]
) -> tuple[Run, dict[str, Any], dict[str, str]]:
    samples: list[Sample] = []
    seconds, early = 0.0, False
    async with connect(served.url, connections=load.concurrency) as client:
        sizer = await client.prepare()
        mix = mixture(load.longest)
        await client.ask(Workload(mix, -1 - load.seed, sizer).request(0), 0.0)
        async with Watch(served.endpoint, every_s=0.25) as watch:
            for part in range(_PARTS):
                first, end = (load.requests * (part + n) // _PARTS for n in (0, 1))
                if first == end:
                    continue
                drive = Drive(Workload(mix, load.seed, sizer), client.ask)
                users = min(load.concurrency, end - first)
                await drive.send(Synthetic(mix, load.seed, users=users, serial=first), end - first)
                samples += drive.samples
                seconds += drive.ended_s - drive.began_s
                so_far = _run(samples, watch, seconds, side, load, ())
                if part < _PARTS - 1 and hopeless(so_far):
                    early = True
                    break
    run = _run(samples, watch, seconds, side, load, ("stopped early",) if early else ())
    ceilings = dict((watch.first.ceilings if watch.first else None) or {})
    if not ceilings:
        raise SideFailed(f"the daemon does not say what it resolved: {watch.why_not}")
    return run, ceilings, watch.versions


def _run(samples: list[Sample], watch: Watch, seconds: float, side: str, load: Load, notes: tuple[str, ...]) -> Run:
    """Without series and single requests: the journal keeps every trial."""
    run = run_of(samples, 0.0, seconds, side=side, watch=watch, seed=load.seed, notes=notes)
    targets = Targets(ttft_s=load.ttft_s, inter_token_s=load.inter_token_s)
    good = [r for r in run.requests if not r.error and targets.met(r.ttft_s or 0.0, r.gap_s or 0.0)]
    run = with_figures(run, goodput_tokens_per_s=round(sum(r.output_tokens for r in good) / seconds, 2))
    return msgspec.structs.replace(run, series=(), requests=(), gaps={}, marks=())
