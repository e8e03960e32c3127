"""What arrives when, and how long it is: seeded traffic, made up or recorded. Pure.

Owns arrivals (closed, Poisson, bursty, diurnal, a switching rate) × lengths (fixed, log-normal, bimodal, heavy tail;
shared system prompts; conversations of several turns; agents with large tool prompts), and the replay of a journal's
shapes or of a JSONL trace. It must not know text, HTTP, the engine or a clock. Enter at `synthetic` or `replay`; the
simulator and the load client both drive a `Traffic`.

A prompt is a stretch of *streams*: its first `system_tokens` are the beginning of one stream, the rest that of another.
Two jobs with the same streams share exactly that prefix, however a driver turns a stream into tokens or words. The
answer of an earlier turn is replaced by as many tokens of the conversation's own stream.
"""

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from telemetry.events import RequestRecord

ARRIVALS: Final = ("poisson", "bursty", "diurnal", "switching")
LENGTHS: Final = ("short", "long", "mixed", "fixed", "lognormal", "bimodal", "heavy", "shared", "turns", "agent")

_BURST_S, _QUIET_S = 10.0, 30.0  # a burst's mean length, and that of the calm after it
_DAY_S = 3600.0  # a simulated day: what grows in half of it, shrinks in the other
_SWITCH_S = 60.0
UNBOUNDED: Final = 1 << 30  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request. `output_tokens` is what its answer would have without any limit."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    kind: str = ""
    stream: int = 0
    system: int = 0
    system_tokens: int = 0
    turn: int = 1  # of its conversation, counted from 1
    serial: int = 0


class Traffic(Protocol):
    """Jobs by time; and what a job's end brings about."""

    def arrivals(self) -> Iterator[Job]:
        """Jobs that come whatever the server does, in the order of `at_s`."""

    def after(self, job: Job, ended_s: float) -> Job | None:
        """The job that follows the end of `job`: a closed loop's next one, or the next turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How long requests are. `turns`: mean turns of a conversation; each adds a prompt like the first's growth."""

    draw: Callable[[random.Random], tuple[str, int, int]]  # kind, prompt tokens, output tokens
    systems: int = 0  # how many system prompts there are; 0 = nobody shares anything
    system_tokens: int = 0
    shared: frozenset[str] = frozenset()  # the kinds that begin with one; empty = every kind
    turns: float = 1.0
    think_s: float = 5.0


def _uniform(
    kind: str, prompt: tuple[int, int], output: tuple[int, int]
) -> Callable[[random.Random], tuple[str, int, int]]:
    return lambda rng: (kind, rng.randint(*prompt), rng.randint(*output))


def _spread(rng: random.Random, median: float, sigma: float, most: int) -> int:
    """Log-normal, cut at `most`."""
    return max(1, min(most, round(rng.lognormvariate(math.log(median), sigma))))


def _lognormal(rng: random.Random) -> tuple[str, int, int]:
    return "lognormal", _spread(rng, 180, 0.9, 6000), _spread(rng, 90, 0.8, 1500)


def _bimodal(rng: random.Random) -> tuple[str, int, int]:
    if rng.random() < 0.8:
        return "short", rng.randint(50, 150), rng.randint(32, 96)
    return "long", rng.randint(1500, 2500), rng.randint(32, 96)


def _mixture(rng: random.Random) -> tuple[str, int, int]:
    """Short prompts, now and then one that is twenty times as long, and answers of any length to either."""
    kind, prompt = ("short", (50, 150)) if rng.random() < 0.8 else ("long", (1000, 2000))
    return kind, rng.randint(*prompt), rng.randint(64, 512)


def _heavy(rng: random.Random) -> tuple[str, int, int]:
    """Pareto with a tail index of 1.2, as prompt lengths of real services have: the mean is made by the rare ones."""
    prompt = min(6000, round(60 * rng.paretovariate(1.2)))
    return ("long" if prompt > 1000 else "short"), prompt, _spread(rng, 80, 0.9, 1500)


def _agent(rng: random.Random) -> tuple[str, int, int]:
    """After a large tool prompt, results of tools; short answers that call the next tool, now and then a long one."""
    return "agent", rng.randint(100, 600), rng.randint(20, 60) if rng.random() < 0.85 else rng.randint(200, 500)


MIXES: Final[dict[str, Mix]] = {
    "short": Mix(draw=_uniform("short", (50, 150), (32, 96))),
    "long": Mix(draw=_uniform("long", (500, 1000), (256, 512))),
    "mixed": Mix(draw=_mixture),
    "fixed": Mix(draw=_uniform("fixed", (128, 128), (128, 128))),
    "lognormal": Mix(draw=_lognormal),
    "bimodal": Mix(draw=_bimodal),
    "heavy": Mix(draw=_heavy),
    "shared": Mix(draw=_uniform("shared", (20, 120), (32, 96)), systems=4, system_tokens=512),
    "turns": Mix(draw=_uniform("turns", (20, 120), (40, 120)), systems=2, system_tokens=128, turns=5.0),
    "agent": Mix(draw=_agent, systems=3, system_tokens=1024, turns=8.0, think_s=1.0),
}


@dataclass(slots=True)
class Synthetic:
    """Seeded traffic: open when `offsets` are given, else closed with `users` who each wait for their answer."""

    mix: Mix
    seed: int
    offsets: Callable[[], Iterator[float]] | None = None
    users: int = 0
    until_s: float = math.inf
    longest: int = UNBOUNDED  # prompt + output: what the server takes at most
    serial: int = 0  # of the last job that was made

    def arrivals(self) -> Iterator[Job]:
        if self.offsets is None:
            for user in range(self.users):
                yield self.next_job(user * 0.01)  # not all in one step
            return
        for at_s in self.offsets():
            if at_s >= self.until_s:
                return
            yield self.next_job(at_s)

    def after(self, job: Job, ended_s: float) -> Job | None:
        rng = random.Random(f"{self.seed}:after:{job.serial}")
        again = self.mix.turns > 1 and rng.random() < 1 - 1 / self.mix.turns
        if again:
            _, more, output = self.mix.draw(rng)
            at_s = ended_s + rng.expovariate(1 / self.mix.think_s)
            prompt = job.prompt_tokens + job.output_tokens + more
            if at_s < self.until_s and prompt + output <= self.longest:
                self.serial += 1
                return Job(
                    at_s=at_s,
                    prompt_tokens=prompt,
                    output_tokens=output,
                    kind=job.kind,
                    stream=job.stream,
                    system=job.system,
                    system_tokens=job.system_tokens,
                    turn=job.turn + 1,
                    serial=self.serial,
                )
        if self.offsets is None and ended_s < self.until_s:
            return self.next_job(ended_s)
        return None

    def next_job(self, at_s: float) -> Job:
        """A new job, of the seed and its own number."""
        self.serial += 1
        rng = random.Random(f"{self.seed}:{self.serial}")
        kind, prompt, output = self.mix.draw(rng)
        begins = self.mix.systems and (not self.mix.shared or kind in self.mix.shared)
        system = rng.randint(1, self.mix.systems) if begins else 0
        shared = self.mix.system_tokens if system else 0
        output = max(1, min(output, self.longest // 2))
        return Job(
            at_s=at_s,
            prompt_tokens=max(1, min(prompt + shared, self.longest - output)),
            output_tokens=output,
            kind=kind,
            stream=1000 + self.serial,
            system=system,
            system_tokens=shared,
            serial=self.serial,
        )


def synthetic(
    lengths: str | Mix,
    *,
    seed: int,
    arrival: str = "poisson",
    rate: float = 0.0,
    users: int = 0,
    until_s: float = math.inf,
    longest: int = UNBOUNDED,
) -> Synthetic:
    """Traffic of a mix, or of the one of that name: `rate` requests/s on average arriving as `arrival`, or else `users`
    in a closed loop. Raises KeyError for an unknown mix, ValueError for unknown arrivals or neither rate nor users."""
    mix = MIXES[lengths] if isinstance(lengths, str) else lengths
    if rate <= 0:
        if users < 1:
            raise ValueError("traffic needs a rate or a number of users")
        return Synthetic(mix, seed, users=users, until_s=until_s, longest=longest)
    if arrival not in ARRIVALS:
        raise ValueError(f"no such arrivals: {arrival} (there are: {', '.join(ARRIVALS)})")
    intensity = {"poisson": _steady, "bursty": _bursts(seed), "diurnal": _day, "switching": _switch}[arrival]
    return Synthetic(mix, seed, lambda: thinned(rate, intensity, seed), until_s=until_s, longest=longest)


def thinned(rate: float, intensity: Callable[[float], float], seed: int) -> Iterator[float]:
    """Offsets of a Poisson process whose rate at time t is `rate · intensity(t)`; intensity is at most `_PEAK`
    (thinning: Lewis and Shedler, 1979)."""
    rng = random.Random(f"{seed}:arrivals")
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate * _PEAK)
        if rng.random() * _PEAK < intensity(at_s):
            yield at_s


_PEAK: Final = 4.0


def _steady(_: float) -> float:
    return 1.0


def _day(at_s: float) -> float:
    return 1.0 + 0.8 * math.sin(2 * math.pi * at_s / _DAY_S)


def _switch(at_s: float) -> float:
    return 1.75 if int(at_s / _SWITCH_S) % 2 else 0.25


def _bursts(seed: int) -> Callable[[float], float]:
    """A quarter of the time four times the calm rate, by a two-state Markov chain; 1 on average."""
    rng = random.Random(f"{seed}:bursts")
    ends: list[tuple[float, float]] = [(rng.expovariate(1 / _QUIET_S), 4 / 7)]

    def intensity(at_s: float) -> float:
        while at_s >= ends[-1][0]:
            busy = ends[-1][1] < 1
            ends.append(
                (ends[-1][0] + rng.expovariate(1 / (_BURST_S if busy else _QUIET_S)), 16 / 7 if busy else 4 / 7)
            )
        del ends[:-1]  # times only grow
        return ends[-1][1]

    return intensity


@dataclass(slots=True)
class Replay:
    """Recorded jobs, at `times` their rate. Nothing follows a job: what did, is in the recording."""

    jobs: list[Job] = field(default_factory=list)
    times: float = 1.0

    def arrivals(self) -> Iterator[Job]:
        for job in self.jobs:
            yield _moved(job, job.at_s / self.times)

    def after(self, job: Job, ended_s: float) -> Job | None:
        return None

    def share(self, replicas: int) -> "Replay":
        """What one of so many replicas gets, when they take turns."""
        return Replay(self.jobs[::replicas], self.times)


def _moved(job: Job, at_s: float) -> Job:
    return Job(**{name: getattr(job, name) for name in Job.__dataclass_fields__ if name != "at_s"}, at_s=at_s)


def shapes(records: Iterable[RequestRecord]) -> list[Job]:
    """The jobs of a journal's records that were served. What was cached is taken as a shared beginning, since a journal
    does not say whose it was."""
    kept = sorted((r for r in records if r.output_tokens and r.arrival_ns), key=lambda r: r.arrival_ns)
    return [
        Job(
            at_s=(r.arrival_ns - kept[0].arrival_ns) / 1e9,
            prompt_tokens=max(1, r.prompt_tokens),
            output_tokens=r.output_tokens,
            kind="replayed",
            stream=1000 + n,
            system=1 if r.cached_tokens else 0,
            system_tokens=r.cached_tokens,
            serial=n,
        )
        for n, r in enumerate(kept)
    ]


def trace(lines: Iterable[str]) -> list[Job]:
    """The jobs of a JSONL trace: {"at_s", "prompt_tokens", "output_tokens"}, and optionally the other fields of a Job.
    Raises ValueError that names the line."""
    jobs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            job = Job(**{"stream": 1000 + number, "serial": number, "kind": "trace", **found})
            if job.at_s < 0 or job.prompt_tokens < 1 or job.output_tokens < 1:
                raise ValueError("at_s must be 0 or more, both counts of tokens 1 or more")
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number} of the trace: {error}") from None
        jobs.append(job)
    return sorted(jobs, key=lambda job: job.at_s)
