"""What a fault leaves behind, as flat values: readings of memory, the step that failed, how a process ended; and the
verdict that is drawn from them.

Owns the shapes and the closed set of causes of an out-of-memory. Whoever measures fills them in; forensics.py judges;
an Incident carries both. It must not know who measured, and none of these may hold prompt text, output or keys. A field
that is None was not measured: the truth on many machines, and never the same as 0. Enter at any of the structs.
"""

from typing import Final

import msgspec

OOM_CAUSES: Final = (
    "capacity",
    "fragmentation",
    "kv_exhausted",
    "activation_spike",
    "logits",
    "neighbour",
    "host_cgroup",
    "leak",
    "unknown",
)
OF_A_REQUEST: Final = ("activation_spike", "logits")  # causes that are one request's doing
# Whose limit stops an allocation: ours alone (a quota, an address space), or one that others share.
SHARED_SCOPES: Final = ("device", "cgroup", "host")
SCOPES: Final = ("process", "address_space", *SHARED_SCOPES)


class Reading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory as one meter saw it at `at_ns` (monotonic), under the limit that is nearest to being hit."""

    at_ns: int = 0
    scope: str = ""  # SCOPES; empty = unknown
    limit_bytes: int | None = None
    free_bytes: int | None = None  # below that limit
    own_bytes: int | None = None  # this process's, without the KV blocks' content
    kv_bytes: int | None = None  # content of KV blocks in use
    neighbour_bytes: int | None = None  # of everybody else under a shared limit
    allocator_free_bytes: int | None = None  # taken from the system, but not in use: the allocator's cache
    largest_free_bytes: int | None = None  # the largest piece of that
    typical_step_bytes: int | None = None  # what a step takes at its peak, as a rule


class FailedStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The step that could not be computed. `request_id` is that of the largest part, `chunk_*` its grant."""

    step: int
    phase: str = ""  # forward | logits | prompt_logprobs | sample | rows
    tokens: int = 0
    rows: int = 0
    context_tokens: int = 0
    request_id: str = ""
    chunk_start: int = 0
    chunk_tokens: int = 0
    typical_tokens: int = 0  # median of the steps before; 0 = there were none
    waiting: int = 0
    running: int = 0
    kv_active: int = 0  # blocks
    kv_blocks: int = 0


class MemoryFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An allocation of `requested_bytes` (0: the allocator did not say) failed while `step` ran.

    `first` was read when the engine began to serve, `before` at its last quiet moment, `at` when it failed.
    """

    requested_bytes: int
    step: FailedStep
    first: Reading = Reading()
    before: Reading = Reading()
    at: Reading = Reading()
    planned_activation_bytes: int | None = None  # what the plan at start kept for a step


class ProcessEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a process ended, or why it had to be ended. `last_lines` are its own log's."""

    process: str  # engine | daemon | both
    exit_code: int | None = None  # negative: by that signal; None: nobody was there to see
    oom_kills: int | None = None  # by how many the control group's counter moved meanwhile
    killed_here: bool = False
    lacked_memory: bool = False  # its last words say that it could not get any
    stuck_ms: int = 0
    phase: str = ""  # what it was doing, as far as it said
    last_lines: tuple[str, ...] = ()


class Clue(msgspec.Struct, frozen=True):
    """One piece of evidence, for or against one cause."""

    cause: str
    speaks: str  # for | against | unknown
    text: str


class Knob(msgspec.Struct, frozen=True):
    """A setting that would have prevented it, and how far it should be turned."""

    name: str
    advice: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`cause` with the clues for it and against each other one; `knobs`, best first."""

    cause: str
    summary: str
    clues: tuple[Clue, ...] = ()
    knobs: tuple[Knob, ...] = ()
