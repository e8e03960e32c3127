"""The stopwatch of one HTTP request and the RequestRecord of each of its choices.

Owns the partition of [arrival, last byte handed to the socket] into the stages of telemetry.events.STAGES: it sums
exactly, whatever the engine reported, because each stage is cut off at the boundary of the next. It must not know
bodies or sockets. Enter at `Stopwatch` and `compose`.
"""

import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from daemon.api.choice import Choice
from engine.request import EngineFacts
from telemetry.events import RequestRecord

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")
_ENGINE_STAGES = ("queue", "prefill", "prefill_wait", "decode", "preempted")


@dataclass(frozen=True, slots=True)
class Trace:
    """A W3C trace context: the caller's trace, or one of our own; our span in it, and the caller's if there is one."""

    trace_id: str
    span_id: str
    parent_span_id: str = ""
    sampled: bool = False
    state: str = ""  # the caller's tracestate, as it came

    @classmethod
    def begin(
        cls, traceparent: str | None, decide: Callable[[str, bool | None], bool], tracestate: str | None = None
    ) -> "Trace":
        """`decide(trace id, the caller's decision)` says whether it is sampled. A malformed header is none, and without
        a traceparent there is no tracestate."""
        span_id = f"{secrets.randbits(64) or 1:016x}"
        match = _TRACEPARENT.fullmatch(traceparent or "")
        if match is None or not int(match[1], 16) or not int(match[2], 16):
            trace_id = f"{secrets.randbits(128) or 1:032x}"
            return cls(trace_id, span_id, sampled=decide(trace_id, None))
        state = tracestate if tracestate and _TRACESTATE.fullmatch(tracestate) else ""
        return cls(match[1], span_id, match[2], decide(match[1], bool(int(match[3], 16) & 1)), state)

    def span_of(self, index: int) -> str:
        """Each choice has a span of its own; the first has the one that the caller is told of."""
        return f"{(int(self.span_id, 16) + index) % (1 << 64) or 1:016x}"

    @property
    def response(self) -> str:
        """What the caller is told: the header `traceresponse` (W3C Trace Context, level 2)."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def log_ids(group_id: str, trace: Trace) -> dict[str, str]:
    """What every line of the log about a request carries (daemon/logs.py)."""
    return {"request_id": group_id, "trace_id": trace.trace_id, "span_id": trace.span_id}


class Stopwatch:
    """Time in the daemon before the engine has the request: either admission or tokenizing."""

    __slots__ = ("admission_ns", "arrival_ns", "submitted_ns", "tokenize_ns")

    def __init__(self, arrival_ns: int) -> None:
        self.arrival_ns = arrival_ns
        self.submitted_ns = 0  # 0 = never
        self.admission_ns = 0
        self.tokenize_ns = 0

    @contextmanager
    def tokenizing(self) -> Iterator[None]:
        """While text is made into tokens."""
        since_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.tokenize_ns += time.monotonic_ns() - since_ns

    def submitted(self, at_ns: int) -> None:
        self.submitted_ns = at_ns

    def before_wire(self, end_ns: int) -> dict[str, int]:
        """The stages up to the submission, or up to `end_ns` if there was none."""
        until_ns = self.submitted_ns or end_ns
        return {
            "admission": until_ns - self.arrival_ns - self.tokenize_ns,
            "tokenize": self.tokenize_ns,
        }


def partition(watch: Stopwatch, facts: EngineFacts | None, taken_ns: int, end_ns: int) -> dict[str, int]:
    """Stages > 0 of one choice, in ns; they sum to `end_ns - watch.arrival_ns`.

    `taken_ns`: when its last Output was taken from the stream. `facts` is None if the engine never had it, or never
    told (then all of its time counts as queue).
    """
    stages = watch.before_wire(end_ns)
    if watch.submitted_ns:
        taken_ns = min(max(taken_ns, watch.submitted_ns), end_ns)
        left_ns = taken_ns - watch.submitted_ns
        parts = {"queue": left_ns}
        if facts is not None:
            parts = {"wire_in": max(0, facts.received_ns - watch.submitted_ns)}
            parts |= {name: getattr(facts, f"{name}_ns") for name in _ENGINE_STAGES}
        for name, part_ns in parts.items():
            stages[name] = min(max(0, part_ns), left_ns)
            left_ns -= stages[name]
        stages["wire_out"] = left_ns
        stages["finish"] = end_ns - taken_ns
    return {name: ns for name, ns in stages.items() if ns > 0}


def cut(facts: EngineFacts, end_ns: int) -> EngineFacts:
    """What passed up to `end_ns`: the engine goes on with a choice for a moment after its client has left."""
    over_ns = facts.emitted_ns - end_ns
    if over_ns <= 0 or not facts.pieces:
        return facts
    pieces = list(facts.pieces)
    spent = {stage: getattr(facts, f"{stage}_ns") for stage in _ENGINE_STAGES}
    while over_ns > 0 and pieces:
        stage, length_ns, tokens = pieces.pop()
        gone_ns = min(length_ns, over_ns)
        over_ns -= gone_ns
        spent[stage] -= gone_ns
        if gone_ns < length_ns:
            pieces.append((stage, length_ns - gone_ns, tokens))
    return replace(facts, pieces=tuple(pieces), **{f"{stage}_ns": ns for stage, ns in spent.items()})


def compose(
    watch: Stopwatch, trace: Trace, choice: Choice | None, *, at_ns: int, index: int, **given: Any
) -> RequestRecord:
    """The record of one choice that ended at `at_ns`; None: it never became one. `given` is what the request knows."""
    facts = cut(choice.facts, at_ns) if choice and choice.facts else None
    fields = {} if choice is None else _fields_of(choice, facts or EngineFacts(received_ns=0, emitted_ns=0))
    return RequestRecord(
        at_ns=at_ns,
        arrival_ns=watch.arrival_ns,
        stages=partition(watch, facts, choice.taken_ns if choice else 0, at_ns),
        index=index,
        trace_id=trace.trace_id,
        span_id=trace.span_of(index),
        parent_span_id=trace.parent_span_id,
        trace_sampled=trace.sampled,
        trace_state=trace.state,
        **fields,
        **given,
    )


def _fields_of(choice: Choice, facts: EngineFacts) -> dict[str, Any]:
    sampling = choice.request.sampling
    overlaps = {
        "detokenize": choice.detokenize_ns,
        "send": choice.send_ns,
        "decode_stall": facts.decode_stall_ns,
    }
    return {
        "overlaps": {name: ns for name, ns in overlaps.items() if ns > 0},
        "pieces": facts.pieces,
        "cached_tokens": facts.cached_tokens,
        "output_tokens": choice.output_tokens,
        "first_token_ns": facts.first_token_ns or choice.first_ns,
        "last_token_ns": facts.last_token_ns or choice.last_ns,
        "scheduled_ns": facts.scheduled_ns,
        "queued_ns": facts.received_ns,
        "prefill_chunks": facts.prefill_chunks,
        "preemptions": facts.preemptions,
        "preempted_tokens": facts.preempted_tokens,
        "kv_blocks": facts.kv_blocks,
        "kv_tail_slots": facts.kv_tail_slots,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
    }
