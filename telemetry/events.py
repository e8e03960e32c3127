"""The vocabulary: every event that inferd can say about itself, one frozen struct each.

Owns the event types and the closed sets of names they use (stages, reasons, causes). It must not know who emits an
event or who reads it, and imports nothing of ours but the shapes of evidence. Enter at `Event` (the union's base) and
`encode`/`decode`.

All stamps are CLOCK_MONOTONIC nanoseconds of one host (`time.monotonic_ns`), so a daemon's and its engine's stamps may
be subtracted; stamps of two hosts may not.
"""

from typing import Any, Final

import msgspec

from telemetry.evidence import Clue, Knob, MemoryFault, ProcessEnd

# The stages partition [arrival in the daemon, last byte handed to the socket] of one choice, in this order.
STAGES: Final = (
    "admission",
    "tokenize",
    "wire_in",
    "queue",
    "prefill",
    "prefill_wait",
    "decode",
    "preempted",
    "wire_out",
    "finish",
)
# Work that happens inside a stage; exported under another name and never summed with the stages.
OVERLAPS: Final = ("detokenize", "send", "decode_stall")
FINISH_REASONS: Final = ("stop", "length", "abort", "error", "shed", "deadline", "rejected")
NEVER_SERVED: Final = ("shed", "rejected")  # these say nothing about how fast we serve
STEP_PHASES: Final = ("plan", "launch", "collect", "commit", "publish")
WAITING_REASONS: Final = ("capacity", "kv", "budget")
PREEMPTION_CAUSES: Final = ("kv", "limits", "oom")
INCIDENT_CAUSES: Final = ("oom", "killed", "oom_killed", "crash", "wedged", "leak_suspected")
STEP_BOUNDS: Final = ("compute", "bandwidth", "overhead")
SEVERITIES: Final = ("info", "warning", "critical")
TARGETS: Final = ("ttft_s", "inter_token_s")  # of latency, as the settings call them
BLOCK_AGES: Final = ("lifetime", "idle_before_evict", "reuse_gap")
LOOPS: Final = ("api", "control", "engine")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """What happened, at `at_ns` (monotonic). Subclasses add facts; none may carry prompt text, output text or keys."""

    at_ns: int


class Preempted(msgspec.Struct, frozen=True):
    """One sequence lost its blocks: `tokens_lost` computed positions must be computed again."""

    request_id: str
    tokens_lost: int
    cause: str  # PREEMPTION_CAUSES


class LimitsView(msgspec.Struct, frozen=True, kw_only=True):
    """The live limits as telemetry sees them; the engine's `Limits` is converted into this."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    max_partial_prefills: int
    context_limit: int
    kv_blocks: int
    spec_depth: int
    watermark_blocks: int = 0
    charge_tokens: int = 0


class RequestView(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # thousands a second; holds no container
    """One choice as a snapshot shows it. The engine converts its sequences into this; None is 'not reported'."""

    request_id: str
    state: str  # waiting | running | preempted | finished
    reason: str = ""  # why it waits (WAITING_REASONS), or why it ended (FINISH_REASONS)
    received_ns: int | None = None  # monotonic, by the engine
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None
    computed_tokens: int | None = None
    cached_tokens: int | None = None
    blocks: int | None = None
    row: int | None = None
    priority: int | None = None
    preemptions: int | None = None


class StepReport(Event, frozen=True, kw_only=True):
    """One engine step: plan facts, result facts, pool, queue and memory facts. `at_ns` is the step's start.

    `plan_ns … publish_ns` partition the step's host time; `publish_ns` is that of the previous step, since a report
    cannot time its own publication. Under load, reports are merged (`merged` > 1): sums are added, gauges are the last.
    """

    step: int
    merged: int = 1
    plan_ns: int = 0
    launch_ns: int = 0
    collect_ns: int = 0
    commit_ns: int = 0
    publish_ns: int = 0
    forward_ns: int = 0  # on the device
    sample_ns: int = 0  # on the device
    prefill_rows: int = 0
    decode_rows: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recompute_tokens: int = 0  # granted again after a preemption; not counted in prefill_tokens
    draft_tokens: int = 0
    context_tokens: int = 0  # positions attended to, summed over rows
    running: int = 0
    waiting: int = 0
    preempted_now: int = 0
    waiting_capacity: int = 0
    waiting_kv: int = 0
    waiting_budget: int = 0
    kv_active: int = 0  # blocks
    kv_cached: int = 0
    kv_free: int = 0
    kv_tail_slots: int = 0  # empty slots of the last blocks of running sequences
    kv_stranded_blocks: int = 0  # of running sequences that wait for their readers
    prefix_hit_tokens: int = 0
    prefix_miss_tokens: int = 0
    prefix_too_short_tokens: int = 0
    preemptions: tuple[Preempted, ...] = ()
    admitted: tuple[tuple[int, str], ...] = ()  # (row, request id)
    finished: tuple[str, ...] = ()
    rows: bytes = b""  # int32 little-endian triples (row, start, count), one per slice
    gaps_us: bytes = b""  # uint32 little-endian: inter-token gap of each row that got a token after its first
    longest_gap_us: int = 0  # the largest of them, and whose it is
    longest_gap_of: str = ""
    memory_peak_bytes: int = 0  # at its peak, beside what outlives it; 0 = was not measured, as most are not
    bound: str = ""  # compute | bandwidth | overhead; empty = not known


class FirstToken(Event, frozen=True, kw_only=True):
    """The first token of a choice reached the daemon. `ttft_ns` is counted from arrival in the daemon; `trace_id` is
    empty unless the trace is sampled."""

    request_id: str
    ttft_ns: int
    trace_id: str = ""


class RequestRecord(Event, frozen=True, kw_only=True):
    """How one choice spent its life: exactly one per choice that arrived, also if aborted, shed, rejected or failed.

    `at_ns` is the end. The values of `stages` are > 0 and sum to `at_ns - arrival_ns`.
    """

    request_id: str  # of this choice
    group_id: str  # of the HTTP request (X-Request-Id)
    index: int
    model: str  # the served name, never a client's own string
    operation: str  # chat | text_completion
    stream: bool
    arrival_ns: int
    stages: dict[str, int]
    overlaps: dict[str, int] = {}
    pieces: tuple[tuple[str, int, int], ...] = ()  # the engine's stages as they passed: stage, ns, tokens computed
    reason: str  # FINISH_REASONS
    error: str = ""  # typed error code, never free text of a client
    status: int = 200
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_ns: int = 0  # 0 = never
    last_token_ns: int = 0
    scheduled_ns: int = 0
    queued_ns: int = 0
    prefill_chunks: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0
    kv_blocks: int = 0
    kv_tail_slots: int = 0
    max_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    trace_id: str = ""
    span_id: str = ""  # of this choice's root span
    parent_span_id: str = ""  # the caller's, if it sent one
    trace_sampled: bool = False  # decided at arrival
    trace_state: str = ""  # the caller's, for its own tracing system


class RequestSample(Event, frozen=True, kw_only=True):
    """The body of one request as telemetry/redact.py leaves it: structure, parameters, lengths. Only if asked for."""

    group_id: str  # of the HTTP request (X-Request-Id)
    operation: str
    body: dict[str, Any]


class TokenMix(Event, frozen=True, kw_only=True):
    """What tokens the last `requests` choices were made of, at least a hundred of them: counts of prompt and output
    tokens in 256 buckets of a hash under this installation's salt. Comparable over time, and nobody's text."""

    requests: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]


class EngineStatus(Event, frozen=True, kw_only=True):
    """The engine's heartbeat, about once a second even when idle."""

    state: str  # loading | ready | draining
    progress_ns: int  # stamp of the last step, chunk or idle tick
    steps: int
    limits: LimitsView
    sizes: dict[str, int]  # every queue and map of the engine that can grow
    cpu_ns: int = 0
    rss_bytes: int = 0
    running: int = 0
    waiting: int = 0
    kv_active: int = 0
    kv_cached: int = 0
    kv_free: int = 0
    telemetry_dropped: int = 0
    step_cost: dict[
        str, float
    ] = {}  # the fit: ns of any step, per token, row, position, pair, row squared; and error_ratio
    block_ages_ms: dict[str, bytes] = {}  # sampled since the last beat: BLOCK_AGES → uint32 little-endian


class MemoryReport(Event, frozen=True, kw_only=True):
    """What one process's ledger and probe know: bytes by owner on one device."""

    process: str  # daemon | engine
    device: str
    booked: dict[str, int]
    measured: dict[str, int]
    limit_bytes: int = 0


class EngineStarted(Event, frozen=True, kw_only=True):
    """An engine process is ready. `phases` are the start-up stages in ns; `resolved` is field → value."""

    engine_id: str
    pid: int
    restarts: int
    phases: dict[str, int]
    resolved: dict[str, Any]
    reasons: dict[str, str]
    limits: LimitsView


class EngineEnded(Event, frozen=True, kw_only=True):
    """An engine process is gone. `cause` is one of INCIDENT_CAUSES, or 'drained' for an orderly end."""

    engine_id: str
    cause: str
    detail: str
    exit_code: int = 0
    victims: tuple[str, ...] = ()


class LimitsChanged(Event, frozen=True, kw_only=True):
    """The arbiter replaced the limits."""

    limits: LimitsView
    source: str  # start | tuner | api | config
    why: str


class Decision(Event, frozen=True, kw_only=True):
    """One change of the tuner: what it saw, expected and got. Published when it is made, and once more, under the same
    `number`, with its verdict."""

    number: int = 0
    rule: str
    knob: str
    direction: str  # up | down | rollback
    before: int
    after: int
    evidence: dict[str, float]
    predicted: dict[str, float]
    verdict: str = ""
    measured: dict[str, float] = {}  # with the verdict: the goal's figure, `before` the change and `after` it
    why: str = ""
    also: dict[str, int] = {}  # the other limits of a joint change, and their new values


class TargetsMissed(Event, frozen=True, kw_only=True):
    """Which targets of latency are missed now, each with its reason for people. Published when that changes."""

    missed: dict[str, str]  # of TARGETS → why; empty = none any more


class Finding(Event, frozen=True, kw_only=True):
    """What a runbook's check saw. A daemon publishes one when it is made or changes, and once more, with `active`
    false, when it is gone. The runbook's Markdown: `inferd doctor runbook NAME`, `GET /inferd/v1/runbooks/NAME`."""

    runbook: str
    severity: str  # SEVERITIES
    summary: str
    evidence: dict[str, str]  # what was measured, in words for people; never content
    next_step: str  # one command or sentence
    section: str = ""  # of the runbook, where to read first
    confidence: float = 1.0  # that this is the cause, not only a symptom: 0-1
    explains: tuple[str, ...] = ()  # findings of these runbooks follow from this one
    active: bool = True


class Incident(Event, frozen=True, kw_only=True):
    """A fault, classified. `cause` is an OOM cause or one of INCIDENT_CAUSES; `bundle` is a path or empty.

    `memory`, `end`, `requests` and `stacks` (text by process) are the evidence, `clues` and `knobs` what forensics made
    of it.
    """

    incident_id: str
    kind: str  # INCIDENT_CAUSES
    cause: str
    summary: str
    request_ids: tuple[str, ...] = ()
    bundle: str = ""
    engine_id: str = ""
    clues: tuple[Clue, ...] = ()
    knobs: tuple[Knob, ...] = ()
    memory: MemoryFault | None = None
    end: ProcessEnd | None = None
    stacks: dict[str, str] = {}
    requests: tuple[RequestView, ...] = ()  # those that were running


class StateChanged(Event, frozen=True, kw_only=True):
    """The daemon's life-cycle: starting | ready | degraded | draining | stopped."""

    state: str
    why: str


class LoopLag(Event, frozen=True, kw_only=True):
    """How late an event loop woke up, in microseconds, one figure per sample since the last such event."""

    loop: str  # LOOPS
    lags_us: tuple[int, ...]


AnyEvent = (
    StepReport
    | FirstToken
    | RequestRecord
    | RequestSample
    | TokenMix
    | EngineStatus
    | MemoryReport
    | EngineStarted
    | EngineEnded
    | LimitsChanged
    | TargetsMissed
    | Decision
    | Finding
    | Incident
    | StateChanged
    | LoopLag
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyEvent)


def encode(event: Event) -> bytes:
    """One event as msgpack."""
    return _encoder.encode(event)


def decode(data: bytes | memoryview) -> Event:
    """The event that `encode` wrote. Raises `msgspec.DecodeError` (or its `ValidationError`) for anything else."""
    return _decoder.decode(data)
