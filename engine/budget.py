"""Resolved: the ceilings decided at start, each with its reason. Limits: what may change while serving.

Asked (EngineConfig) ≠ resolved (Resolved) ≠ live (Limits). Stdlib only. `Limits` is replaced whole between two steps
and has one writer, the daemon's arbiter. It must not measure anything itself: measured figures are handed in as
`engine.machine.MachineFacts`. Enter at `resolve`; `memory_plan` is its split of the memory as a table for people.
"""

from dataclasses import dataclass, field, fields, replace

from engine.config import EngineConfig
from engine.errors import ConfigError, DoesNotFit
from engine.kv.layout import DTYPE_BYTES, block_bytes, blocks_for, rope_bytes, rows_bytes
from engine.machine import MachineFacts
from engine.manifest import Manifest

_MAY_BE_NONE = ("spec_depth", "watermark_blocks", "charge_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Live limits, always within the ceilings of `Resolved`."""

    max_num_seqs: int  # rows that run at once
    max_num_batched_tokens: int  # granted positions a step
    prefill_chunk: int  # prompt positions in a step that others decode in; fewer with much context behind them
    max_partial_prefills: int  # prompts that are partly computed at once
    context_limit: int  # prompt + output of one request
    kv_blocks: int  # blocks the scheduler may hold active
    spec_depth: int = 0
    watermark_blocks: int = 0  # to which admission fills the pool, by what it charges; 0 = as far as they are there
    charge_tokens: int = 0  # of its answer, that a newcomer is charged for; at most what it asked for

    def within(self, ceilings: "Resolved") -> "Limits":
        """Itself, if every value is legal; else raises ConfigError naming the field, its value and its bounds."""
        for name, ceiling in ceilings.ceilings().items():
            value = getattr(self, name)
            floor = 0 if name in _MAY_BE_NONE else 1
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
    context_doubling: int = 1 << 30  # tokens of context at which a position costs twice what it costs at none
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
            "watermark_blocks": self.kv_blocks,
            "charge_tokens": self.max_model_len,
        }


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One line of the memory plan: who owns how many bytes, and why so many."""

    owner: str  # runtime | weights | activations | workspace | kv | headroom
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    """What a device gets unasked."""

    rows: int
    step_tokens: int
    prefill_chunk: int  # while others decode
    kv_share: float  # of the available memory that the pool may take when nobody gave a limit


_DEFAULTS = {
    "cpu": _Defaults(rows=64, step_tokens=512, prefill_chunk=40, kv_share=0.25),
    "cuda": _Defaults(rows=256, step_tokens=8192, prefill_chunk=512, kv_share=0.9),
}
_HEADROOM = 0.05  # of the limit, for what no plan foresees
_LEAST_ROWS, _LEAST_STEP_TOKENS = 4, 32
_COMFORT_TOKENS = 4096  # an automatic context shorter than this is worth fewer rows
_PARTIAL_PREFILLS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """What one shape of step (rows x tokens) leaves for the pool, and the longest context it can hold."""

    rows: int
    step_tokens: int
    context: int  # 0 = not even one block
    activation_bytes: int  # at that context
    workspace_bytes: int
    limit_bytes: int
    limit_reason: str
    kv_blocks: int

    @property
    def shape(self) -> str:
        return f"{self.rows} rows x {self.step_tokens} tokens a step"


def resolve(config: EngineConfig, manifest: Manifest, machine: MachineFacts) -> tuple[Resolved, Limits]:
    """The ceilings for this model on this machine, and the limits to begin with. Pure.

    Raises DoesNotFit naming the largest context that fits (or the least limit that would do); ConfigError for a
    context beyond what the model was made for.
    """
    longest = manifest.spec.max_position
    asked = config.max_model_len
    if asked and asked > longest:
        raise ConfigError(
            f"max_model_len={asked} is more than the {longest} positions that {manifest.name} was made for",
            f"use {longest} or less, or leave it out",
        )
    fits = [_fit(config, manifest, machine, *shape) for shape in _shapes(config, machine.device)]
    wanted = asked or min(longest, _COMFORT_TOKENS)
    longest_fit = max(fits, key=lambda f: (f.context, -f.activation_bytes))
    fit = next((f for f in fits if f.context >= wanted), longest_fit)
    if fit.context < (asked or 1):
        raise _does_not_fit(config, manifest, machine, fit)
    return _settle(config, manifest, machine, fit, shrunk_from=None if fit is fits[0] else fits[0])


def memory_plan(resolved: Resolved) -> list[PlanRow]:
    """The split of the limit by owner; the rows sum to `resolved.memory_limit_bytes`."""
    why = resolved.reasons
    rows = [
        PlanRow("runtime", resolved.runtime_bytes, why["runtime_bytes"]),
        PlanRow("weights", resolved.weights_bytes, why["weights_bytes"]),
        PlanRow("activations", resolved.activation_bytes, why["activation_bytes"]),
        PlanRow("workspace", resolved.workspace_bytes, why["workspace_bytes"]),
        PlanRow("kv", resolved.kv_blocks * resolved.kv_block_bytes, why["kv_blocks"]),
    ]
    rest = resolved.memory_limit_bytes - sum(row.bytes for row in rows)
    return [*rows, PlanRow("headroom", rest, "for what no plan foresees, and what the pool has no use for")]


def holds(resolved: Resolved) -> str:
    """What the pool can hold, for people: tokens, and requests of the longest context and of a typical one."""
    tokens = resolved.kv_blocks * resolved.block_size
    longest = max(1, min(resolved.rows, tokens // resolved.max_model_len))
    typical = min(1024, resolved.max_model_len)
    many = min(resolved.rows, tokens // typical)
    return (
        f"KV holds {tokens} tokens: {longest} requests of {resolved.max_model_len} tokens, "
        f"or {many} of {typical}, of {resolved.rows} at once"
    )


def readable(count: int) -> str:
    """Bytes for people: 1.2 GiB, 340 MiB, 12 KiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}" if abs(count) < 10 * size else f"{count / size:.0f} {unit}"
    return f"{count} B"


def _shapes(config: EngineConfig, device: str) -> list[tuple[int, int]]:
    """(rows, step tokens) to try, best first. Only what was not asked for shrinks."""
    defaults = _DEFAULTS[device]
    tokens = config.max_num_batched_tokens or defaults.step_tokens
    rows = config.max_num_seqs or min(defaults.rows, tokens)
    shapes = [(rows, tokens)]
    while True:
        if config.max_num_batched_tokens is None:
            tokens = max(_LEAST_STEP_TOKENS, tokens // 2)
        if config.max_num_seqs is None:
            rows = max(min(_LEAST_ROWS, tokens), rows // 2)
        if (rows, tokens) == shapes[-1]:
            return shapes
        shapes.append((rows, tokens))


def _fit(config: EngineConfig, manifest: Manifest, machine: MachineFacts, rows: int, tokens: int) -> _Fit:
    per_block = block_bytes(manifest.spec, config.block_size, machine.dtype)
    longest = config.max_model_len or manifest.spec.max_position
    always = machine.runtime_bytes + machine.weights_bytes

    def at(context: int) -> _Fit:
        activation = machine.activation.peak(tokens, rows, context)
        workspace = _workspace(config, manifest, machine, rows, context)
        fixed = always + workspace
        limit, reason = _limit(config, machine, fixed + activation)
        blocks = max(0, int(limit * (1 - _HEADROOM)) - fixed - activation) // per_block
        return _Fit(
            rows=rows,
            step_tokens=tokens,
            context=context,
            activation_bytes=activation,
            workspace_bytes=workspace,
            limit_bytes=limit,
            limit_reason=reason,
            kv_blocks=min(blocks, rows * blocks_for(longest, config.block_size)),
        )

    # Longer contexts need more blocks and leave fewer: the largest that holds itself is found by bisection.
    low, high = 0, blocks_for(longest, config.block_size)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if at(middle * config.block_size).kv_blocks >= middle else (low, middle - 1)
    return at(min(low * config.block_size, longest))


def _workspace(config: EngineConfig, manifest: Manifest, machine: MachineFacts, rows: int, context: int) -> int:
    """What the runner holds as long as it lives."""
    tables = rows_bytes(rows, context, config.block_size) + rope_bytes(manifest.spec, context, machine.dtype)
    return machine.workspace_bytes + tables


def _limit(config: EngineConfig, machine: MachineFacts, planned_bytes: int) -> tuple[int, str]:
    """The bytes that all of inferd may take on the device, and who said so. `planned_bytes`: all but the pool."""
    bounds = [(machine.total_bytes, f"all of {machine.device_name}")]
    if machine.cgroup_limit_bytes is not None:
        bounds.append((machine.cgroup_limit_bytes, "the control group's limit"))
    if config.memory_limit_bytes is not None:
        bounds.append((config.memory_limit_bytes, "asked for (--memory-limit)"))
    limit, reason = min(bounds)
    if len(bounds) == 1:
        share = _DEFAULTS[machine.device].kv_share
        pool = int(machine.available_bytes * share)
        unasked = int((planned_bytes + pool) / (1 - _HEADROOM))
        if unasked < limit:
            return unasked, (
                f"no limit was given, so KV takes at most {share:.0%} of the {readable(machine.available_bytes)} "
                "available now; --memory-limit gives it more or less"
            )
    return limit, reason


def _does_not_fit(config: EngineConfig, manifest: Manifest, machine: MachineFacts, fit: _Fit) -> DoesNotFit:
    """How much is missing, and what of it the operator can change: what was asked for is never lowered on its own."""
    context = config.max_model_len or config.block_size
    needed = machine.runtime_bytes + machine.weights_bytes + _workspace(config, manifest, machine, fit.rows, context)
    needed += machine.activation.peak(fit.step_tokens, fit.rows, context)
    needed += block_bytes(manifest.spec, config.block_size, machine.dtype) * blocks_for(context, config.block_size)
    least_mib = int(needed / (1 - _HEADROOM) / (1 << 20)) + 1
    missing = readable((least_mib << 20) - fit.limit_bytes)
    asked = {"--max-num-seqs": config.max_num_seqs, "--max-num-batched-tokens": config.max_num_batched_tokens}
    ways = [f"lower --max-model-len to {fit.context}"] if fit.context else []
    if least_mib << 20 <= min(machine.total_bytes, machine.cgroup_limit_bytes or machine.total_bytes):
        ways.append(f"give it --memory-limit {least_mib}MiB")
    ways += [f"lower {flag}" for flag, value in asked.items() if value is not None]
    ways += [] if fit.context else ["take a smaller model"]
    what = f"{manifest.name} with a context of {context} tokens" if config.max_model_len else manifest.name
    return DoesNotFit(
        f"{what} does not fit into {readable(fit.limit_bytes)} ({fit.limit_reason}) and needs {missing} more: "
        f"runtime {readable(machine.runtime_bytes)}, weights {readable(machine.weights_bytes)}, "
        f"activations {readable(fit.activation_bytes)} for {fit.shape}, KV for {context} tokens",
        ", or ".join(ways),
    )


def _settle(
    config: EngineConfig, manifest: Manifest, machine: MachineFacts, fit: _Fit, shrunk_from: _Fit | None
) -> tuple[Resolved, Limits]:
    spec = manifest.spec
    resolved = Resolved(
        device=machine.device,
        dtype=machine.dtype,
        kv_dtype=machine.dtype,
        threads=machine.threads,
        block_size=config.block_size,
        rows=fit.rows,
        step_tokens=fit.step_tokens,
        max_model_len=config.max_model_len or fit.context,
        kv_blocks=fit.kv_blocks,
        memory_limit_bytes=fit.limit_bytes,
        weights_bytes=machine.weights_bytes,
        kv_block_bytes=block_bytes(spec, config.block_size, machine.dtype),
        workspace_bytes=fit.workspace_bytes,
        activation_bytes=fit.activation_bytes,
        runtime_bytes=machine.runtime_bytes,
        context_doubling=spec.context_doubling,
        prefix_cache=config.prefix_cache,
        reasons=_reasons(config, manifest, machine, fit, shrunk_from),
    )
    limits = Limits(
        max_num_seqs=resolved.rows,
        max_num_batched_tokens=resolved.step_tokens,
        prefill_chunk=min(_DEFAULTS[machine.device].prefill_chunk, resolved.step_tokens),
        max_partial_prefills=min(_PARTIAL_PREFILLS, resolved.rows),
        context_limit=resolved.max_model_len,
        kv_blocks=resolved.kv_blocks,
    )
    return resolved, limits.within(resolved)


def _kept(manifest: Manifest, machine: MachineFacts) -> str:
    """How the weights lie in memory."""
    whole = manifest.parameters * DTYPE_BYTES[machine.dtype]
    return f"as {machine.dtype}" if machine.weights_bytes >= whole else "in the file's own blocks, for compiled kernels"


def _reasons(
    config: EngineConfig, manifest: Manifest, machine: MachineFacts, fit: _Fit, shrunk_from: _Fit | None
) -> dict[str, str]:
    """A sentence for every field of Resolved, for somebody tired."""
    longest = manifest.spec.max_position
    default = f"the default on {machine.device}"
    if shrunk_from:
        default = f"lowered from {shrunk_from.shape}, so that a longer context fits"
    if config.max_model_len:
        context = "asked for (--max-model-len)"
    elif fit.context >= longest:
        context = f"all {longest} positions that the model was made for"
    else:
        context = f"the longest that fits into {readable(fit.limit_bytes)}; the model could do {longest}"
    whole = config.max_model_len or longest
    enough = fit.kv_blocks == fit.rows * blocks_for(whole, config.block_size)
    return {
        "device": machine.device_name,
        "dtype": machine.dtype_reason,
        "kv_dtype": "as the activations",
        "threads": machine.threads_reason,
        "block_size": "tokens a block: the unit of KV allocation and of prefix reuse",
        "rows": "asked for (--max-num-seqs)" if config.max_num_seqs else default,
        "step_tokens": "asked for (--max-num-batched-tokens)" if config.max_num_batched_tokens else default,
        "max_model_len": context,
        "kv_blocks": f"{fit.rows} rows of {whole} tokens; more would lie idle"
        if enough
        else f"what the limit leaves: {fit.kv_blocks * config.block_size} tokens over all requests",
        "memory_limit_bytes": fit.limit_reason,
        "weights_bytes": f"{manifest.parameters / 1e6:.0f} M parameters {_kept(manifest, machine)}",
        "kv_block_bytes": f"{config.block_size} tokens x {manifest.spec.num_layers} layers x keys and values",
        "workspace_bytes": f"tokens and block tables of {fit.rows} rows, and the table of positions",
        "activation_bytes": f"the largest step: {fit.shape}, logits and prompt log-probabilities included",
        "runtime_bytes": "interpreter and libraries of the engine, and the daemon",
        "context_doubling": "tokens of context at which attention costs as much as the weights: prefill chunks shrink",
        "prefix_cache": "on" if config.prefix_cache else "switched off",
        "spec_depth": "no draft model",
    }
