"""Traffic against a real daemon for so many seconds, its memory beside it, and the same traffic for the simulator.

Owns what several tuner measurements share; not a script. Enter at `drive`, `like` and `calibrated`.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from statistics import fmean
from typing import Any

import msgspec

from autotune.costmodel import Demand, forecast
from autotune.simulate import Outcome, Simulation
from autotune.watch import new_steps, samples_of
from autotune.whatif import Calibration
from autotune.window import Window
from autotune.workload import Job, Mix, Synthetic, Traffic, synthetic
from autotune.worth import Worth
from daemon.lab.calibrate import calibration
from daemon.load.client import EMPTY, Sample, connect
from daemon.load.drive import Drive
from daemon.load.workload import LoadRequest, Workload
from engine.budget import Limits
from telemetry.events import StepReport
from tests.perf.served import Served

_TEMPLATE_TOKENS = 64
_DRAWN = 2000  # jobs that the mean of a load is taken of


@dataclass(frozen=True, kw_only=True)
class Load:
    """What arrives: a mix, and `users` in a closed loop or `rate` requests a second."""

    mix: Mix
    seed: int
    users: int = 0
    rate: float = 0.0
    arrival: str = "poisson"

    def traffic(self, longest: int) -> Synthetic:
        return synthetic(
            self.mix, seed=self.seed, users=self.users, rate=self.rate, arrival=self.arrival, longest=longest
        )


@dataclass
class Ran:
    """One stretch of load. Stamps are seconds since its begin; `served`: what each job number came to, also after the
    end; `steps` and `computed` (prompt tokens): of the engine, until then."""

    seconds: float
    samples: list[tuple[float, Sample]] = field(default_factory=list)
    served: dict[int, Sample] = field(default_factory=dict)
    in_use: list[tuple[float, float]] = field(default_factory=list)  # share of the memory limit
    seen: list[tuple[float, dict[str, Any]]] = field(default_factory=list)  # the daemon's totals and newest steps
    steps: int = 0
    computed: int = 0

    def tokens_per_s(self, from_s: float) -> float:
        """Of requests that ended after `from_s`, whole."""
        good = sum(s.output_tokens for s in self._whole(from_s))
        return good / (self.seconds - from_s)

    def written_per_s(self, from_s: float) -> float:
        """Tokens of answers after `from_s`, also of those that are not at their end: where answers take as long as the
        measurement, few end within it. Nobody is late where there is no target, and `drive` raises if one failed."""
        windows = self.windows(from_s)
        return sum(window.output_tokens for window in windows) / sum(window.seconds for window in windows)

    def windows(self, from_s: float) -> list[Window]:
        """What was computed after `from_s`, in stretches of half a second, by the daemon's own counts."""
        return [_window(*pair) for pair in pairwise(seen for seen in self.seen if seen[0] >= from_s)]

    def figures(self, from_s: float) -> dict[str, float]:
        """What can be said of a simulation as well: rates per second, times in seconds."""
        done = self._whole(from_s)
        first = sorted(s.chunks_s[0] - s.due_s for s in done)
        return {
            "goodput": self.tokens_per_s(from_s),
            "finished": len(done),
            "ttft_p50": first[len(first) // 2] if first else 0.0,
            "latency_mean": fmean(s.ended_s - s.due_s for s in done) if done else 0.0,
            "steps": self.steps,
            "prompt_tokens_computed": self.computed,
        }

    def _whole(self, from_s: float) -> list[Sample]:
        return [s for at_s, s in self.samples if from_s <= at_s <= self.seconds and not s.error]

    def above(self, share: float) -> float:
        """The share of the time in which more was in use."""
        return sum(used > share for _, used in self.in_use) / max(1, len(self.in_use))


async def _drive(served: Served, load: Load, seconds: float, text: int, whole: bool) -> Ran:
    ran, begun = Ran(seconds), _progress(served)
    async with connect(served.url) as client:
        client.ignore_eos = True
        workload = Workload(load.mix, text or load.seed, await client.prepare())
        began_s = time.perf_counter()

        async def ask(request: LoadRequest, due_s: float) -> Sample:
            sample = await client.ask(request, due_s)
            ran.served[request.index] = sample
            ran.samples.append((sample.ended_s - began_s, sample))
            return sample

        drive = Drive(workload, ask)

        async def watch() -> None:
            while True:
                seen = await asyncio.to_thread(served.snapshot, "memory,totals,steps")
                memory = seen["memory"]
                ran.seen.append((time.perf_counter() - began_s, seen))
                if memory["used_bytes"] and memory["limit_bytes"]:
                    ran.in_use.append((time.perf_counter() - began_s, memory["used_bytes"] / memory["limit_bytes"]))
                await asyncio.sleep(0.5)

        watching = asyncio.create_task(watch())

        async def end() -> None:
            await asyncio.sleep(seconds)
            watching.cancel()
            (drive.finish if whole else drive.stop)()
            until = await asyncio.to_thread(_progress, served)
            ran.steps, ran.computed = (now - then for now, then in zip(until, begun, strict=True))

        ending = asyncio.create_task(end())
        await drive.send(load.traffic(client.longest - _TEMPLATE_TOKENS))
        await ending
    failed = [s.error for _, s in ran.samples if s.error and s.error != EMPTY]  # a model may have nothing to say
    if failed:
        raise RuntimeError(f"of {len(ran.samples)} requests {len(failed)} failed: {sorted(set(failed))}")
    return ran


def _window(before: tuple[float, dict[str, Any]], now: tuple[float, dict[str, Any]]) -> Window:
    """Only the figures that `Worth` reads."""
    (began_s, was), (ended_s, seen) = before, now
    grown = {name: _counted(seen, name) - _counted(was, name) for name in ("output_tokens", "prefill", "lost")}
    steps = new_steps(*(msgspec.convert(told["steps"] or [], list[StepReport]) for told in (was, seen)))
    return Window(
        seconds=ended_s - began_s,
        output_tokens=grown["output_tokens"],
        prefill_tokens=grown["prefill"],
        lost_tokens=grown["lost"],
        samples=tuple(samples_of(steps)),
    )


def _counted(seen: dict[str, Any], name: str) -> int:
    totals = seen["totals"]
    if name == "lost":
        return sum(totals["preempted_tokens"].values())
    return int((totals["step_tokens"] or {}).get(name, 0) if name == "prefill" else totals[name])


def _progress(served: Served) -> tuple[int, int]:
    """Steps and prompt tokens that the engine has computed so far."""
    seen = served.snapshot("steps,totals")
    return max((s["step"] for s in seen["steps"] or ()), default=0), (seen["totals"]["step_tokens"] or {}).get(
        "prefill", 0
    )


def drive(served: Served, load: Load, seconds: float, text: int = 0, whole: bool = True) -> Ran:
    """`whole`: wait for the answers that are under way in the end, so that the lengths of all are known. `text`: a seed
    of other words of the same lengths, which the prefix cache has not seen. Each answer is as long as was asked for.
    Raises RuntimeError if a request failed."""
    return asyncio.run(_drive(served, load, seconds, text, whole))


def like(load: Load, longest: int, served: dict[int, Sample]) -> Traffic:
    """The same jobs with the lengths that they had live: a chat template is added, and a full context ends an answer.
    What the template and the opening of each have in common is found in the prefix cache: the least hit there was."""
    jobs = load.traffic(longest)
    known = list(served.values())
    if not known:
        raise RuntimeError("no request ended in time: there is nothing to compare with")
    more = fmean(s.prompt_tokens - s.prompt_tokens_aimed for s in known)
    outputs = [s.output_tokens for s in known]
    opening = min((s.cached_tokens for s in known if s.cached_tokens), default=0)

    def lived(job: Job) -> Job:
        sample = served.get(job.serial)
        output = sample.output_tokens if sample else outputs[job.serial % len(outputs)]
        prompt = sample.prompt_tokens if sample else job.prompt_tokens + round(more)
        begins = min(job.system_tokens + opening, prompt)
        output = max(1, min(output, longest - prompt))
        return replace(job, prompt_tokens=prompt, output_tokens=output, system_tokens=begins)

    return _Mapped(jobs, lived)


def priced(known: Calibration, traffic: Traffic, rows: float) -> Worth:
    """One list of prices, to measure every run of a load by: in 45 s come too few long prompts, and too many or none
    of them, for the tokens of answers to say how much was done. In the long run of a load both measures agree, whatever
    the prices: what it makes of prompts and answers then is the load's mix."""
    jobs = list(islice(_ever(traffic), _DRAWN))
    demand = Demand.of([(j.system_tokens, j.prompt_tokens - j.system_tokens, j.output_tokens) for j in jobs])
    share = forecast(known.cost, demand, rows, known.resolved.step_tokens).mixed_share
    return Worth(cost=known.cost, demand=demand, rows=rows, mixed_share=share)


def together(ran: Ran) -> float:
    """Rows that decode in a step, of steps in which any does."""
    decoding = [s.shape.decode_rows for window in ran.windows(0.0) for s in window.samples if s.shape.decode_rows]
    return fmean(decoding)


def _ever(traffic: Traffic) -> Iterator[Job]:
    """Its jobs, one after another, as if each had ended at once."""
    for job in traffic.arrivals():
        following: Job | None = job
        while following is not None:
            yield following
            following = traffic.after(following, following.at_s)


@dataclass(slots=True)
class _Mapped:
    jobs: Synthetic
    lived: Callable[[Job], Job]

    def arrivals(self) -> Iterator[Job]:
        return map(self.lived, self.jobs.arrivals())

    def after(self, job: Job, ended_s: float) -> Job | None:
        following = self.jobs.after(job, ended_s)
        return self.lived(following) if following else None


def calibrated(served: Served) -> Calibration:
    """As `inferd tune simulate` calibrates itself by this daemon."""
    return calibration(str(served.runtime / "control.sock"), "", "", served.state)


def simulated(known: Calibration, limits: Limits, traffic: Traffic, seconds: float, from_s: float) -> Outcome:
    """Its figures are of the time after `from_s`."""
    return Simulation(known.resolved, limits, known.cost, traffic, scored_from_s=from_s).run(seconds)


def figures_of(outcome: Outcome) -> dict[str, float]:
    """As `Ran.figures`."""
    return {
        "goodput": outcome.goodput,
        "finished": outcome.finished,
        "ttft_p50": outcome.ttft.percentile(50) or 0.0,
        "latency_mean": outcome.latency.mean,
        "steps": outcome.steps,
        "prompt_tokens_computed": sum(window.prefill_tokens for _, _, window in outcome.periods),
    }


def steer(served: Served, **order: object) -> None:
    """Raises RuntimeError if the daemon refuses."""
    status, body = served.control("/inferd/v1/tuner", "POST", order)
    if status != 200:
        raise RuntimeError(f"the tuner's order {order} was refused: {body.decode()}")


def limits_of(served: Served) -> Limits:
    return Limits(**json.loads(served.control("/inferd/v1/snapshot?include=limits")[1])["limits"])
