"""Forensics: what a failed allocation or a dead process was due to, judged from what was measured and nothing else.

Owns the rules. Pure: the same evidence gives the same verdict, whoever gathered it. It must not measure, read files or
know where evidence comes from. Enter at `judge_memory` for a failed allocation, at `judge_end` for a process.

The rule for memory is a counterfactual. Let R be what was asked for, F what was free, and G what has grown since the
engine began to serve (what we hold ourselves, the KV blocks in use, others under the same limit, pieces that the
allocator keeps). If R would have fit into F + G, then what grew most took the memory. If not, the step itself is too
large: because of logits, because of one request's chunk, or because there never was room for a step of this size.
"""

from collections.abc import Sequence
from typing import Final

from telemetry.evidence import OOM_CAUSES, SHARED_SCOPES, Clue, Knob, MemoryFault, ProcessEnd, Reading, Verdict

_LOGITS_PHASES: Final = ("logits", "prompt_logprobs", "sample")
_SPIKE: Final = 2  # times a typical step's tokens
_NOISE_BYTES: Final = 1 << 20  # growth below this is not held against anybody...
_NOISE_SHARE: Final = 0.5  # ...unless it is so much of what was asked for
_TOP_PAD_BYTES: Final = 128 << 10  # M_TOP_PAD of glibc
_ARENA_BYTES: Final = 1 << 20  # what an allocator asks the system for, if it needs more at all
_BREATH_BYTES: Final = 64 << 20
_HEAP_BYTES: Final = 16 << 20  # a heap always has holes; so much of them is a heap in pieces
_LEAST_SHARE: Final = 0.25  # of the room there was: who took less did not take the room

_KNOBS: Final = {
    "capacity": (
        Knob("--max-num-batched-tokens", "lower it: a step's activations shrink with it"),
        Knob("--max-num-seqs", "lower it: fewer rows sample at once"),
        Knob("--memory-limit", "raise it, if the machine has more"),
    ),
    "fragmentation": (
        Knob("--max-num-batched-tokens", "lower it: smaller pieces suffice"),
        Knob("MALLOC_ARENA_MAX", "set it to 1 in the environment, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    ),
    "kv_exhausted": (
        Knob("kv_blocks", "lower this live limit (POST /inferd/v1/tuner), or --max-num-seqs"),
        Knob("--max-model-len", "lower it: a request then holds fewer blocks"),
    ),
    "activation_spike": (
        Knob("prefill_chunk", "lower this live limit (POST /inferd/v1/tuner): long prompts come in smaller pieces"),
        Knob("--max-num-batched-tokens", "lower it: it bounds every step"),
    ),
    "logits": (
        Knob("--max-num-seqs", "lower it: logits take vocabulary x rows"),
        Knob("logprobs", "ask for them on shorter prompts, or not with echo"),
    ),
    "neighbour": (
        Knob("--memory-limit", "lower it to what the neighbour leaves, or move one of the two elsewhere"),
        Knob("memory.max", "give each its own control group, so that neither can take the other's share"),
    ),
    "host_cgroup": (
        Knob("--memory-limit", "set it below the control group's limit; it must cover daemon and engine"),
        Knob("memory.max", "raise the container's limit"),
    ),
    "leak": (
        Knob("restart", "`inferd doctor do restart-engine` gives the memory back, until it has grown again"),
        Knob("report", "report it with this bundle: memory grew that nobody has booked"),
    ),
    "unknown": (Knob("--max-num-batched-tokens", "lower it, then --max-num-seqs: both bound what a step needs"),),
}


# What a reader of the verdict need not know the code for: phases of a step, and whose a limit is.
IN_WORDS: Final = {
    "rows": "the bookkeeping of its rows",
    "forward": "the model's layers",
    "logits": "the logits",
    "prompt_logprobs": "the log-probabilities of a prompt",
    "sample": "sampling",
    "process": "this process's own limit",
    "address_space": "this process's address space, RLIMIT_AS",
    "device": "the device",
    "cgroup": "the control group",
    "host": "the machine",
}


def mib(amount: int | None) -> str:
    """For people: '12.5 MiB', '40.0 KiB'; 'an unknown amount' for None."""
    if amount is None:
        return "an unknown amount"
    if abs(amount) < 1 << 20:
        return f"{amount} bytes" if abs(amount) < 1024 else f"{amount / 1024:.1f} KiB"
    return f"{amount / 1048576:.1f} MiB"


def judge_memory(fault: MemoryFault) -> Verdict:
    """The verdict on a failed allocation."""
    grown = _grown(fault)
    cause = _cause(fault, grown)
    clues = tuple(_clue(name, cause, fault, grown) for name in OOM_CAUSES if name != "unknown")
    lead = next((clue.text for clue in clues if clue.cause == cause), "the measurements do not decide it")
    asked = mib(fault.requested_bytes) if fault.requested_bytes else "memory"
    phase = IN_WORDS.get(fault.step.phase, fault.step.phase or "a step")
    summary = f"step {fault.step.step} could not get {asked} for {phase}: {lead}"
    return Verdict(cause=cause, summary=summary, clues=clues, knobs=_KNOBS[cause])


def _cause(fault: MemoryFault, grown: dict[str, int]) -> str:
    at, asked = fault.at, fault.requested_bytes
    if _in_pieces(fault.first, at, asked):
        return "fragmentation"
    if at.free_bytes is not None and not asked and at.free_bytes < _ARENA_BYTES:
        asked = _ARENA_BYTES  # it did not say how much, but there was not even this
    if at.free_bytes is None or not asked:
        return _step_cause(fault) or "unknown"
    shortfall = _wanted(at, asked) - at.free_bytes
    if shortfall <= 0:  # there was enough, in one piece or of unknown shape: something else refused
        return "unknown"
    room = at.free_bytes + sum(grown.values())
    takers = {name: amount for name, amount in grown.items() if _counts(amount, asked, room)}
    if takers.get("leak", 0) < _breath(at):
        takers.pop("leak", None)
    if sum(takers.values()) >= shortfall:
        return max(takers, key=lambda name: takers[name])
    return _step_cause(fault) or ("host_cgroup" if at.scope in ("cgroup", "host") else "capacity")


def _counts(amount: int, asked: int, room: int) -> bool:
    return amount >= _LEAST_SHARE * room and (amount >= _NOISE_BYTES or amount >= _NOISE_SHARE * asked)


def _breath(at: Reading) -> int:
    """By how much our own memory may grow without leaking: resident memory breathes, an allocator's count does not."""
    return 0 if at.scope in ("process", "device") else _BREATH_BYTES + (at.own_bytes or 0) // 20


def _step_cause(fault: MemoryFault) -> str:
    """Why the step itself needs so much; empty if it is like the others."""
    if fault.step.phase in _LOGITS_PHASES:
        unknown = fault.at.typical_step_bytes is None  # and tokens say nothing about logits
        return "logits" if unknown or _typical_fits(fault) else ""
    return "activation_spike" if _is_spike(fault) else ""


def _is_spike(fault: MemoryFault) -> bool:
    step = fault.step
    own_share = 2 * step.chunk_tokens > step.tokens
    large = step.chunk_tokens > 1 and step.tokens >= _SPIKE * max(1, step.typical_tokens)
    return own_share and large and _typical_fits(fault)


def _typical_fits(fault: MemoryFault) -> bool:
    """Whether a step like those before would have had room. Where nobody measured one, memory is taken to grow with a
    step's tokens; what this step held already is only known where nothing else is under the limit."""
    at, step = fault.at, fault.step
    free = at.free_bytes or 0
    held = 0
    if at.scope in ("process", "device") and at.limit_bytes is not None and fault.before.own_bytes is not None:
        others = fault.before.own_bytes + (at.kv_bytes or 0) + (at.neighbour_bytes or 0)
        held = max(0, at.limit_bytes - free - others)
    if at.typical_step_bytes is not None:
        return at.typical_step_bytes <= free + held
    share = step.typical_tokens / max(1, step.tokens)
    return share * (fault.requested_bytes + held) <= free + held


def _in_pieces(first: Reading, at: Reading, asked: int) -> bool:
    """Enough has become free, but in no single piece: what the limit leaves cannot be joined to what the allocator
    keeps."""
    if at.allocator_free_bytes is None or at.largest_free_bytes is None or not asked:
        return False
    since = at.allocator_free_bytes - (first.allocator_free_bytes or 0)
    if at.scope not in ("process", "device") and since < _HEAP_BYTES:
        return False
    return (at.free_bytes or 0) < _wanted(at, asked) and at.largest_free_bytes < asked <= since


def _wanted(at: Reading, asked: int) -> int:
    """What the system is asked for: the C library grows its heap by more than it needs at once."""
    return asked + (_TOP_PAD_BYTES if at.scope == "address_space" else 0)


def _grown(fault: MemoryFault) -> dict[str, int]:
    """Bytes by which each taker grew from the first reading to the last quiet one, by the cause that it speaks for."""
    first, before, at = fault.first, fault.before, fault.at
    grown = {"leak": _difference(first.own_bytes, before.own_bytes)}
    if at.scope != "address_space":  # the pool is mapped whole at the start: its blocks take no addresses
        grown["kv_exhausted"] = _difference(first.kv_bytes, at.kv_bytes)
    if at.scope in SHARED_SCOPES:
        grown["neighbour"] = _difference(first.neighbour_bytes, at.neighbour_bytes)
    return {name: amount for name, amount in grown.items() if amount > 0}


def _difference(then: int | None, now: int | None) -> int:
    return 0 if then is None or now is None else now - then


def _clue(name: str, cause: str, fault: MemoryFault, grown: dict[str, int]) -> Clue:
    text = _TEXTS[name](fault, grown)
    if text.startswith("not measured"):
        return Clue(name, "unknown", text)
    return Clue(name, "for" if name == cause else "against", text)


def _capacity(fault: MemoryFault, grown: dict[str, int]) -> str:
    at, free = fault.at, mib(fault.at.free_bytes)
    if at.free_bytes is None:
        return "not measured: how much was free below the limit"
    return (
        f"{free} were free below {IN_WORDS.get(at.scope, 'the limit')} ({mib(at.limit_bytes)}) for a step of "
        f"{fault.step.tokens} tokens; {mib(sum(grown.values()))} of what is taken was still free at the start"
    )


def _fragmentation(fault: MemoryFault, grown: dict[str, int]) -> str:
    at = fault.at
    if at.allocator_free_bytes is None:
        return "not measured: what the allocator holds in pieces"
    return (
        f"the allocator holds {mib(at.allocator_free_bytes)} that nobody uses, largest piece "
        f"{mib(at.largest_free_bytes)}, while {mib(fault.requested_bytes)} were asked for"
    )


def _kv(fault: MemoryFault, grown: dict[str, int]) -> str:
    step = fault.step
    if fault.at.kv_bytes is None:
        return "not measured: bytes of the KV blocks in use"
    used = f"{step.kv_active} of {step.kv_blocks} KV blocks were in use, {mib(fault.at.kv_bytes)}"
    if fault.at.scope == "address_space":
        return f"{used}; their addresses were taken when the engine started"
    return f"{used}: {mib(grown.get('kv_exhausted', 0))} more than at the start"


def _spike(fault: MemoryFault, grown: dict[str, int]) -> str:
    step = fault.step
    text = f"the step had {step.tokens} tokens, where {step.typical_tokens} are usual"
    if not step.request_id:
        return text
    whose = f"request {step.request_id} had {step.chunk_tokens} of them"
    return f"{text}; {whose}, from position {step.chunk_start} of its context on"


def _logits(fault: MemoryFault, grown: dict[str, int]) -> str:
    step = fault.step
    what = "where vocabulary x rows are held" if step.phase in _LOGITS_PHASES else "where no logits exist"
    whose = f"; the largest part was request {step.request_id}'s" if step.request_id else ""
    return f"it failed in {IN_WORDS.get(step.phase, step.phase or 'an unknown phase')}, {what}{whose}"


def _neighbour(fault: MemoryFault, grown: dict[str, int]) -> str:
    at = fault.at
    if at.scope and at.scope not in SHARED_SCOPES:
        return f"the limit that was hit is {IN_WORDS[at.scope]}: others cannot take from it"
    if at.neighbour_bytes is None:
        return "not measured: what others under the same limit use"
    more = mib(grown.get("neighbour", 0))
    return f"others under the same limit use {mib(at.neighbour_bytes)}, {more} more than at the start"


def _host(fault: MemoryFault, grown: dict[str, int]) -> str:
    at = fault.at
    if at.scope in ("cgroup", "host"):
        return f"the {at.scope}'s limit was hit: {mib(at.free_bytes)} of {mib(at.limit_bytes)} were left"
    return "the process lives, and the limit that was hit is not the host's"


def _leak(fault: MemoryFault, grown: dict[str, int]) -> str:
    if fault.first.own_bytes is None or fault.before.own_bytes is None:
        return "not measured: what this process holds between steps"
    return (
        f"between steps this process held {mib(fault.before.own_bytes)}, and {mib(fault.first.own_bytes)} when it "
        f"began to serve: {mib(grown.get('leak', 0))} more"
    )


_TEXTS: Final = {
    "capacity": _capacity,
    "fragmentation": _fragmentation,
    "kv_exhausted": _kv,
    "activation_spike": _spike,
    "logits": _logits,
    "neighbour": _neighbour,
    "host_cgroup": _host,
    "leak": _leak,
}


def judge_end(end: ProcessEnd, last: Reading | None = None) -> Verdict:
    """The verdict on a process that is gone or has to go; `last` is the last reading of its memory, if any.

    Cause `oom_killed` only where the control group counted a kill: a bare SIGKILL stays `killed`.
    """
    cause, why = _end_cause(end)
    clues = [Clue(cause, "for", why)]
    if cause != "oom_killed":
        clues.append(_no_oom_kill(end.oom_kills))
    if cause == "killed" and last is not None and last.limit_bytes and last.free_bytes is not None:
        share = 1 - last.free_bytes / last.limit_bytes
        text = f"the last reading had {share:.0%} of {mib(last.limit_bytes)} in use"
        clues.append(Clue("oom_killed", "for" if share >= 0.95 else "against", text))
    if end.phase:
        clues.append(Clue(cause, "for", f"it was last seen in {end.phase}"))
    knobs = _END_KNOBS.get(cause, ())
    who = "engine and daemon" if end.process == "both" else f"the {end.process}"
    return Verdict(cause=cause, summary=f"{who}: {why}", clues=tuple(clues), knobs=knobs)


def _end_cause(end: ProcessEnd) -> tuple[str, str]:
    if end.stuck_ms:
        return "wedged", f"no progress for {end.stuck_ms / 1000:.1f} s in {end.phase or 'an unknown phase'}"
    if end.lacked_memory:
        return "oom", f"its last words say that it could not get memory; it {_how(end.exit_code)}"
    if end.exit_code is None:
        if end.oom_kills:
            return "oom_killed", f"ended without a word, and the kernel counted {end.oom_kills} kill(s) for memory"
        return "killed", "ended without a word: SIGKILL, or the machine went down"
    if end.exit_code == -9:
        if end.oom_kills:
            return "oom_killed", f"killed by the kernel, which counted {end.oom_kills} kill(s) for memory"
        return "killed", "killed by the daemon" if end.killed_here else "killed by SIGKILL, from outside"
    return "crash", f"it {_how(end.exit_code)}"


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "ended unseen"
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended by itself with exit code {exit_code}"


def _no_oom_kill(oom_kills: int | None) -> Clue:
    if oom_kills is None:
        return Clue("oom_killed", "unknown", "not measured: no control group counts kills here")
    return Clue("oom_killed", "against", "the control group's oom_kill counter did not move")


_END_KNOBS: Final = {
    "oom_killed": _KNOBS["host_cgroup"],
    "oom": _KNOBS["capacity"],
    "wedged": (
        Knob("progress_deadline", "raise it only if the stacks show work that is slow but moves"),
        Knob("stacks", "the thread that holds the others up is in this bundle"),
    ),
    "killed": (Knob("grace", "whoever stops inferd should send SIGTERM and wait so long before SIGKILL"),),
    "crash": (Knob("last_lines", "the engine's last words are in this bundle"),),
}


def against(verdict: Verdict) -> Sequence[Clue]:
    """The clues that do not speak for the cause found."""
    return [clue for clue in verdict.clues if clue.speaks != "for"]
