"""Resolved: the ceilings that the hardware decided at start, each with its reason. Limits: what may change while serving.

Asked (EngineConfig) ≠ resolved (Resolved) ≠ live (Limits). Stdlib only. `Limits` is replaced whole between two steps and
has one writer, the daemon's arbiter. It must not measure anything itself: measured figures are handed in.
"""

from dataclasses import dataclass, field, fields, replace

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Live limits, always within the ceilings of `Resolved`."""

    max_num_seqs: int  # rows that run at once
    max_num_batched_tokens: int  # granted positions a step
    prefill_chunk: int  # largest grant of a prefill while others decode
    max_partial_prefills: int  # prompts that are partly computed at once
    context_limit: int  # prompt + output of one request
    kv_blocks: int  # blocks the scheduler may hold active
    spec_depth: int = 0

    def within(self, ceilings: "Resolved") -> "Limits":
        """Itself, if every value is legal; else raises ConfigError naming the field, its value and its bounds."""
        for name, ceiling in ceilings.ceilings().items():
            value = getattr(self, name)
            floor = 0 if name == "spec_depth" else 1
            if not isinstance(value, int) or isinstance(value, bool) or not floor <= value <= ceiling:
                raise ConfigError(
                    f"limit {name}={value!r} is outside [{floor}, {ceiling}]", "see `inferd serve --plan`"
                )
        return self

    def replaced(self, changes: dict[str, int]) -> "Limits":
        """A copy with `changes`; raises ConfigError for a name that is no limit."""
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise ConfigError(f"no such limit: {name}", f"one of {', '.join(sorted(known))}")
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Ceilings and choices that are allocated and profiled at start. `reasons` has an entry for every other field."""

    device: str
    dtype: str  # of weights and activations: float32 | bfloat16 | float16
    kv_dtype: str
    threads: int
    block_size: int  # tokens
    rows: int  # ceiling of max_num_seqs
    step_tokens: int  # ceiling of max_num_batched_tokens
    max_model_len: int  # ceiling of context_limit
    kv_blocks: int  # ceiling of kv_blocks
    memory_limit_bytes: int
    weights_bytes: int
    kv_block_bytes: int
    workspace_bytes: int
    activation_bytes: int  # peak of the largest legal step, logits included
    runtime_bytes: int  # interpreter, libraries, the daemon's share
    prefix_cache: bool = True
    spec_depth: int = 0
    reasons: dict[str, str] = field(default_factory=dict)

    def ceilings(self) -> dict[str, int]:
        """The largest legal value of each field of `Limits`."""
        return {
            "max_num_seqs": self.rows,
            "max_num_batched_tokens": self.step_tokens,
            "prefill_chunk": self.step_tokens,
            "max_partial_prefills": self.rows,
            "context_limit": self.max_model_len,
            "kv_blocks": self.kv_blocks,
            "spec_depth": self.spec_depth,
        }
