"""From a prepared model to a runner: look at the machine, plan, load, warm up; every stage timed.

Owns the order of start-up on the device. The plan itself is engine/budget.py's. Enter at `start`.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine import toolchain
from engine.budget import Limits, Resolved, resolve
from engine.config import EngineConfig
from engine.device.faults import FaultyMeter
from engine.device.meter import CudaMeter, HostMeter, Meter, Readings
from engine.device.rows import Rows
from engine.device.runner import TorchRunner, translated
from engine.device.sample import Sampler
from engine.errors import ConfigError
from engine.kernels.cpu import Cpu
from engine.kernels.naive import NaiveCpu, NaiveNative
from engine.kernels.native import Native
from engine.kernels.ops import Ops
from engine.kernels.reference import Reference
from engine.kv.layout import blocks_for
from engine.kv.store import KVStore
from engine.layers.decoder import Decoder
from engine.layers.rotary import rope_tables
from engine.load.assign import Weights
from engine.load.checkpoint import Checkpoint, dtype_of
from engine.machine import ActivationCost, MachineFacts, cpu, host_facts
from engine.manifest import Manifest
from engine.models.families import builder
from engine.plan import RowInit, SeqSlice, StepPlan
from engine.request import SamplingParams
from telemetry import probe, residency
from telemetry.ledger import Ledger

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A runner ready to serve, what was resolved, the limits to begin with, the stages of start-up in ns, and who has
    which bytes."""

    resolved: Resolved
    limits: Limits
    runner: TorchRunner
    phases: dict[str, int]
    ledger: Ledger
    pool: tuple[int, int] | None  # address and length of the pool's own mapping
    bandwidth_bytes_per_ns: float  # of the device's memory
    readings: Callable[[], Readings]
    faults: FaultyMeter | None = None


class _Phases:
    """Stamps the end of each stage."""

    def __init__(self, progress: Progress) -> None:
        self.ns: dict[str, int] = {}
        self._progress = progress
        self._since_ns = time.monotonic_ns()

    def end(self, name: str, share: float) -> None:
        now_ns = time.monotonic_ns()
        self.ns[name] = now_ns - self._since_ns
        self._since_ns = now_ns
        self._progress(name, share)


def start(config: EngineConfig, manifest: Manifest, model_dir: Path, progress: Progress) -> Started:
    """Raises ModelError (files), ConfigError (settings), DoesNotFit (memory), OutOfMemory."""
    phases = _Phases(progress)
    device = _device(config)
    bandwidth = _bandwidth_bytes_per_ns(torch.device(device))
    ledger = Ledger()
    ledger.freeze(device, _held_bytes(device))
    facts = _cuda_facts(config, manifest) if device == "cuda" else host_facts(config, manifest, _resident_bytes())
    dtype = dtype_of(facts.dtype)
    ops = _cpu_ops(config, dtype, facts.threads, progress) if device == "cpu" else Reference()
    # Compiled kernels have a pool of their own; a second one would only be in its way.
    torch.set_num_threads(1 if isinstance(ops, Native) else facts.threads)
    checkpoint = Checkpoint(manifest.weight_paths(model_dir), manifest.blocks)
    dry = Weights(checkpoint, ops, torch.device(device), dtype, dry=True)
    build = builder(manifest.spec.family)
    build(manifest.spec, dry, ops)
    resolved, limits = resolve(config, manifest, replace(facts, weights_bytes=dry.bytes))
    resolved = replace(resolved, reasons={**resolved.reasons, "device": f"{facts.device_name}; {ops.reason}"})
    phases.end("plan", 0.1)
    with translated(), torch.inference_mode():
        weights = Weights(checkpoint, ops, torch.device(device), dtype)
        model = build(manifest.spec, weights, ops)
        ledger.book(device, "weights", weights.bytes)
        phases.end("weights", 0.7)
        store = KVStore(manifest.spec, resolved)
        meter = _meter(store, torch.device(resolved.device))
        faults = FaultyMeter(meter) if config.faults else None
        runner = _runner(manifest, resolved, model, store, faults or meter)
        ledger.book(device, "workspace", runner.workspace_bytes)
        if store.mapped is None:
            ledger.book(device, "kv", store.bytes)
        phases.end("pool", 0.8)
    before_bytes = _lasting_bytes(device)
    _warm_up(runner, resolved)
    del weights, checkpoint  # and with it the mapping of what was repacked
    # What the first step set up for good: kernels made for this machine, and the stacks of their threads.
    ledger.book(device, "workspace", max(0, _lasting_bytes(device) - before_bytes))
    phases.end("warm_up", 1.0)
    return Started(
        resolved=resolved,
        limits=limits,
        runner=runner,
        phases=phases.ns,
        faults=faults,
        readings=(faults or meter).readings,
        ledger=ledger,
        pool=store.mapped,
        bandwidth_bytes_per_ns=bandwidth,
    )


def _runner(manifest: Manifest, resolved: Resolved, model: Decoder, store: KVStore, meter: Meter) -> TorchRunner:
    spec, device = manifest.spec, torch.device(resolved.device)
    rope = rope_tables(spec, resolved.max_model_len + 1, device, dtype_of(resolved.dtype))
    return TorchRunner(model, store, Rows(resolved, store), Sampler(spec.vocab_size, device), rope, meter)


def _meter(store: KVStore, device: torch.device) -> Meter:
    return HostMeter(store.mapped) if store.mapped else CudaMeter(device)


def _warm_up(runner: TorchRunner, resolved: Resolved) -> None:
    """As many tokens as a step may have, in one row, then a decode: what is lazy is done before a request comes.
    It is not the largest step in memory: many rows that sample at a long context take more, and only the plan counts
    those."""
    most = min(resolved.step_tokens, resolved.max_model_len - 1, resolved.kv_blocks * resolved.block_size - 1)
    blocks = tuple(range(blocks_for(most + 1, resolved.block_size)))
    params = SamplingParams(max_tokens=2, temperature=0.0)
    begin = RowInit(row=0, request_id="warm-up", tokens=(0,) * most, prompt_len=most, sampling=params, blocks=blocks)
    whole = SeqSlice(row=0, start=0, count=most, sample=True)
    for plan in (
        StepPlan(step=0, admitted=(begin,), slices=(whole,)),
        StepPlan(step=0, slices=(SeqSlice(row=0, start=most, count=1, sample=True),)),
        StepPlan(step=0, slices=(), released=(0,), discarded=blocks),
    ):
        runner.launch(plan)
        runner.collect()


def _device(config: EngineConfig) -> str:
    if config.device != "auto":
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch sees no CUDA device here", "use --device cpu, or check the driver")
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _cpu_ops(config: EngineConfig, dtype: torch.dtype, threads: int, progress: Progress) -> Ops:
    """The compiled table where there can be one, else torch's operators; the reason says why."""
    native, plain = (NaiveNative, NaiveCpu) if "fast_attention" in config.without else (Native, Cpu)
    why = ""
    if dtype != torch.float32:
        return plain(dtype)
    if "compiled_kernels" in config.without:
        why = "compiled kernels are switched off"
    else:
        try:
            return native(_kernels(config, progress), threads)
        except toolchain.CannotCompile as reason:
            why = f"no compiled kernels: {reason}"
    ops = plain(dtype)
    ops.reason += f"; {why}"
    return ops


def _kernels(config: EngineConfig, progress: Progress) -> Path:
    cache = Path(config.cache_dir or _default_cache())
    return toolchain.library(cache, cpu()[0], lambda: progress("compiling the CPU kernels, once", 0.0))


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inferd"


def _cuda_facts(config: EngineConfig, manifest: Manifest) -> MachineFacts:
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    return MachineFacts(
        device="cuda",
        device_name=torch.cuda.get_device_name(),
        total_bytes=total_bytes,
        available_bytes=free_bytes,
        cgroup_limit_bytes=None,  # it bounds the host's memory, not the device's
        threads=config.threads or 1,
        threads_reason="asked for" if config.threads else "the host only launches kernels",
        dtype=dtype,
        dtype_reason="the device's native half precision" if config.dtype == "auto" else "asked for (--dtype)",
        runtime_bytes=total_bytes - free_bytes,
        weights_bytes=0,
        activation=ActivationCost.estimate(manifest.spec, dtype),
    )


def _bandwidth_bytes_per_ns(device: torch.device) -> float:
    """What memory can do: the best of three copies of 32 MiB, read and written."""
    source = torch.ones(32 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_ns = 0
    for _ in range(3):
        begun_ns = time.monotonic_ns()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took_ns = time.monotonic_ns() - begun_ns
        best_ns = min(best_ns or took_ns, took_ns)
    return 2 * source.numel() / max(1, best_ns)


def _held_bytes(device: str) -> int:
    """What the process holds on the device before anything is booked; on a host without the pages of files, which come
    and go."""
    if device == "cuda":
        return 0
    held = probe.resident()
    return held.anonymous_bytes + held.shared_bytes if held else 0


def _lasting_bytes(device: str) -> int:
    """What the process holds without what its allocator has free for the next one who asks."""
    heap = residency.heap()
    return _held_bytes(device) - (heap.free_bytes if heap else 0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
