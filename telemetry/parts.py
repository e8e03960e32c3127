"""The parts of a snapshot: flat values for people and programs that watch a daemon.

Owns their shape only; a field that is None is not reported. It must not know where a figure comes from: snapshot.py
does. Enter at any of the structs.
"""

import msgspec

from telemetry import events


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what a snapshot is made of."""


class StateView(Part, frozen=True, kw_only=True):
    """Daemon and engine now. `progress_age_ns` is since the engine's last step, part of a step, or idle tick."""

    daemon: str | None = None
    daemon_why: str | None = None
    daemon_age_ns: int | None = None  # since the daemon is in that state
    daemon_pid: int | None = None
    state_dir: str | None = None
    engine: str | None = None
    engine_why: str | None = None
    engine_id: str | None = None
    engine_pid: int | None = None
    restarts: int | None = None
    progress_age_ns: int | None = None
    report_age_ns: int | None = None
    start_phases: dict[str, int] | None = None  # ns


class Percentiles(Part, frozen=True, kw_only=True):
    """Seconds over the window; `count` observations."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


class LatencyView(Part, frozen=True, kw_only=True):
    """The last minute: time to first token, gap between tokens, end to end; and rates per second."""

    window_seconds: int
    ttft: Percentiles
    inter_token: Percentiles
    e2e: Percentiles
    output_tokens_per_second: float
    prefill_tokens_per_second: float
    requests_per_second: float
    steps_per_second: float
    loop_lag: dict[str, Percentiles] | None = None  # by loop: how late it wakes up


class TimeBreakdown(Part, frozen=True, kw_only=True):
    """Shares (0–1) of the time of the choices that ended in the window by stage, and of its steps by phase."""

    window_seconds: int
    stages: dict[str, float]
    step_phases: dict[str, float]
    step_seconds: float  # host time of all steps of the window
    step_cost: dict[str, float] | None = None  # as fitted: ns of any step, per token, row, position; and error_ratio


class QueueView(Part, frozen=True, kw_only=True):
    """Choices in the engine."""

    running: int
    waiting: int
    preempted: int
    waiting_capacity: int
    waiting_kv: int
    waiting_budget: int


class KvView(Part, frozen=True, kw_only=True):
    """KV blocks. `block_map` is the engine's, one entry a block (base64 in JSON)."""

    active: int | None = None
    cached: int | None = None
    free: int | None = None
    block_size: int | None = None
    block_bytes: int | None = None
    tail_ratio: float | None = None
    stranded_ratio: float | None = None
    hit_tokens: int | None = None
    miss_tokens: int | None = None
    too_short_tokens: int | None = None
    block_map: bytes | None = None


class MemoryView(Part, frozen=True, kw_only=True):
    """Bytes. `booked` and `measured` are by process and then by owner or kind, as the ledgers and probes report."""

    device: str | None = None
    limit_bytes: int | None = None
    owners: dict[str, int] | None = None  # they sum to the limit
    source: str | None = None  # of the owners: ledger | plan
    used_bytes: int | None = None
    reserved_bytes: int | None = None
    weights_bytes: int | None = None
    pool_bytes: int | None = None
    engine_resident_bytes: int | None = None
    daemon_resident_bytes: int | None = None
    booked: dict[str, dict[str, int]] | None = None
    measured: dict[str, dict[str, int]] | None = None


class TotalsView(Part, frozen=True, kw_only=True):
    """Counters since the daemon's start, as on /metrics."""

    finished: dict[str, int]
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    preemptions: dict[str, int]
    preempted_tokens: dict[str, int]
    restarts: dict[str, int]
    step_tokens: dict[str, int] | None = None  # granted, by kind
    telemetry_dropped: dict[str, int] | None = None


class RequestsView(Part, frozen=True, kw_only=True):
    """`live` is None when the engine did not answer; `finished` are the last ones, newest first."""

    live: list[events.RequestView] | None = None
    finished: list[events.RequestRecord] = []


class Sample(Part, frozen=True, kw_only=True):
    """A few figures at `at_ns`, kept every some seconds for the last half hour: what crept, and what was lost when.
    Tokens, preemptions and drops are counters since the daemon's start."""

    at_ns: int
    running: int | None = None
    waiting: int | None = None
    kv_active: int | None = None  # blocks
    daemon_resident_bytes: int | None = None
    engine_resident_bytes: int | None = None
    used_bytes: int | None = None
    unbooked_bytes: int | None = None
    output_tokens: int = 0
    granted_tokens: int = 0
    recompute_tokens: int = 0
    preemptions: int = 0
    dropped: dict[str, int] = {}
