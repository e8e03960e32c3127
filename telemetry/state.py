"""What the fold knows: plain counters, histograms, and the latest of everything, as one mutable value.

Owns the shape and the bounds: every map here is keyed by names that inferd's own code chose, or is capped. It must not
know how an event changes it (fold.py) or how it is shown (metrics/, snapshot.py). Enter at `State`.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from telemetry import buckets, events
from telemetry.evidence import OOM_CAUSES
from telemetry.stats import Histogram, Window

KEPT_RECORDS = 512
KEPT_STEPS = 512
KEPT_TRACED = 4096
KEPT_NOTES = 64
KEPT_RULES = 64


def zeros(names: Iterable[str]) -> dict[str, int]:
    """A counter per name, so that a series exists before its first event."""
    return dict.fromkeys(names, 0)


def _each(names: Iterable[str], bounds: Sequence[float]) -> dict[str, Histogram]:
    return {name: Histogram(bounds) for name in names}


@dataclass(slots=True)
class Queue:
    """Requests in the engine now. `waiting` = capacity + kv + budget + those that no step has looked at yet."""

    running: int = 0
    waiting: int = 0
    preempted: int = 0
    capacity: int = 0
    kv: int = 0
    budget: int = 0


@dataclass(slots=True)
class Blocks:
    """KV blocks now."""

    active: int
    cached: int
    free: int
    tail_slots: int = 0
    stranded: int = 0

    @property
    def total(self) -> int:
        return self.active + self.cached + self.free


@dataclass(slots=True, kw_only=True)
class State:
    """Counters are since the daemon's start and never go back; `None` is 'not reported'."""

    model: str
    window: Window = field(default_factory=Window)

    # Requests
    finished: dict[str, int] = field(default_factory=lambda: zeros(events.FINISH_REASONS))
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram((*buckets.TTFT, *buckets.VLLM_TTFT)))
    gap: Histogram = field(default_factory=lambda: Histogram((*buckets.TOKEN, *buckets.VLLM_INTER_TOKEN)))
    per_token: Histogram = field(default_factory=lambda: Histogram((*buckets.TOKEN, *buckets.VLLM_INTER_TOKEN)))
    latency: Histogram = field(default_factory=lambda: Histogram((*buckets.LATENCY, *buckets.VLLM_LATENCY)))
    stages: dict[str, Histogram] = field(default_factory=lambda: _each(events.STAGES, buckets.STAGE))
    overlaps: dict[str, Histogram] = field(default_factory=lambda: _each(events.OVERLAPS, buckets.STAGE))
    queued: Histogram = field(default_factory=lambda: Histogram(buckets.VLLM_LATENCY))
    prefilled: Histogram = field(default_factory=lambda: Histogram(buckets.VLLM_LATENCY))
    decoded: Histogram = field(default_factory=lambda: Histogram(buckets.VLLM_LATENCY))
    inferred: Histogram = field(default_factory=lambda: Histogram(buckets.VLLM_LATENCY))
    prompt_lengths: Histogram = field(default_factory=lambda: Histogram(buckets.TOKENS))
    output_lengths: Histogram = field(default_factory=lambda: Histogram(buckets.TOKENS))
    longest_outputs: Histogram = field(default_factory=lambda: Histogram(buckets.TOKENS))
    max_tokens: Histogram = field(default_factory=lambda: Histogram(buckets.TOKENS))
    choices: Histogram = field(default_factory=lambda: Histogram(buckets.VLLM_N))
    records: OrderedDict[str, events.RequestRecord] = field(default_factory=OrderedDict)

    mix: events.TokenMix | None = None

    # Steps
    phases: dict[str, Histogram] = field(default_factory=lambda: _each(events.STEP_PHASES, buckets.STEP))
    device_phases: dict[str, Histogram] = field(default_factory=lambda: _each(("forward", "sample"), buckets.STEP))
    step_tokens: dict[str, int] = field(default_factory=lambda: zeros(("prefill", "decode", "draft", "recompute")))
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(buckets.VLLM_ITERATION_TOKENS))
    bound: dict[str, int] = field(default_factory=lambda: zeros(events.STEP_BOUNDS))
    steps: deque[events.StepReport] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    peaks_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))  # of measured steps
    queue: Queue = field(default_factory=Queue)

    # KV
    blocks: Blocks | None = None
    block_ages: dict[str, Histogram] = field(default_factory=lambda: _each(events.BLOCK_AGES, buckets.BLOCK_AGE))
    prefix: dict[str, int] = field(default_factory=lambda: zeros(("hit", "miss", "too_short")))
    preemptions: dict[str, int] = field(default_factory=lambda: zeros(events.PREEMPTION_CAUSES))
    preempted_tokens: dict[str, int] = field(default_factory=lambda: zeros(events.PREEMPTION_CAUSES))

    # Engine, memory, faults, tuner
    started: events.EngineStarted | None = None
    ended: events.EngineEnded | None = None
    status: events.EngineStatus | None = None
    limits: events.LimitsView | None = None
    lifecycle: events.StateChanged | None = None
    progress_ns: int | None = None
    engine_dropped: int = 0
    engine_cpu_ns: int = 0
    memory: dict[str, events.MemoryReport] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=lambda: zeros(events.INCIDENT_CAUSES))
    incident_counts: dict[str, int] = field(default_factory=lambda: zeros(events.INCIDENT_CAUSES))
    ooms: dict[str, int] = field(default_factory=lambda: zeros(OOM_CAUSES))
    decision_counts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    incidents: deque[events.Incident] = field(default_factory=lambda: deque(maxlen=KEPT_NOTES))
    findings: dict[str, events.Finding] = field(default_factory=dict)  # by runbook
    missed_targets: dict[str, str] | None = None
    decisions: deque[events.Decision] = field(default_factory=lambda: deque(maxlen=KEPT_NOTES))
    lag: dict[str, Histogram] = field(default_factory=lambda: _each(events.LOOPS, buckets.LAG))
    unfolded: int = 0  # events that the fold could not take: a defect of ours, counted
