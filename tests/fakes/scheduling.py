"""A scheduler and a FakeRunner joined as engine/loop.py joins them, with a clock of their own: for tests of the
control plane."""

from dataclasses import dataclass, field

from engine.budget import Limits, Resolved
from engine.errors import OutOfMemory
from engine.features import Parts
from engine.output import Output
from engine.plan import StepPlan
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from tests.fakes.runner import FakeRunner

STEP_NS = 1_000_000


def ceilings(*, rows: int = 8, kv_blocks: int = 64, block_size: int = 4, **changes: int | bool) -> Resolved:
    """Ceilings of a machine that does not exist; 1,024 tokens a step and a request unless said otherwise."""
    facts: dict[str, int | bool] = {
        "threads": 1,
        "step_tokens": 1024,
        "max_model_len": 1024,
        "memory_limit_bytes": 0,
        "weights_bytes": 0,
        "kv_block_bytes": 1,
        "workspace_bytes": 0,
        "activation_bytes": 0,
        "runtime_bytes": 0,
        **changes,
    }
    return Resolved(
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        block_size=block_size,
        rows=rows,
        kv_blocks=kv_blocks,
        **facts,  # type: ignore[arg-type]  # a table of defaults
    )


def widest(resolved: Resolved, **changes: int) -> Limits:
    """The limits at their ceilings and no watermark, except for `changes`."""
    free = {"max_partial_prefills": min(4, resolved.rows), "watermark_blocks": 0, "charge_tokens": 0}
    return Limits(**{**resolved.ceilings(), **free, **changes})


def request(name: str, prompt: int | tuple[int, ...], tokens: int = 4, **fields: object) -> Request:
    """A greedy request; an int makes a prompt of that many tokens that shares no prefix with another name's."""
    if isinstance(prompt, int):
        prompt = tuple(hash((sum(name.encode()) * 31 + len(name), i)) % 997 for i in range(prompt))
    sampling = {k: fields.pop(k) for k in list(fields) if k in SamplingParams.__dataclass_fields__}
    sampling.setdefault("temperature", 0.0)
    return Request(id=name, prompt=prompt, sampling=SamplingParams(max_tokens=tokens, **sampling), **fields)  # type: ignore[arg-type]


@dataclass
class Bench:
    """`step` is one step; `answers` and `ends` are what came out so far, `plans` what was planned."""

    resolved: Resolved
    limits: Limits
    output_credit: int = 1 << 30
    parts: Parts = field(default_factory=Parts)
    runner: FakeRunner = field(init=False)
    scheduler: Scheduler = field(init=False)
    now_ns: int = 1_000
    answers: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, Output] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = FakeRunner(self.resolved.block_size)
        self.scheduler = Scheduler(
            self.resolved, self.limits, cache_root="fake", output_credit=self.output_credit, parts=self.parts
        )

    def add(self, *requests: Request) -> None:
        self.take(self.scheduler.add(requests, self.now_ns))

    def cancel(self, *names: str, reason: str = "abort") -> None:
        self.take(self.scheduler.cancel(names, reason, self.now_ns))

    def step(self) -> StepPlan:
        """Plan, compute, commit. An OutOfMemory of the runner is answered by `retry_after_oom`."""
        plan = self.scheduler.plan(self.now_ns)
        self.plans.append(plan)
        self.now_ns += STEP_NS
        try:
            self.runner.launch(plan)
        except OutOfMemory:
            self.scheduler.retry_after_oom(plan, self.now_ns)
        else:
            self.take(self.scheduler.commit(self.runner.collect(), self.now_ns))
        return plan

    def drain(self, most: int = 10_000) -> None:
        """Step until nothing is left to do. Fails after `most` steps: somebody makes no progress."""
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {most} steps: {self.scheduler.sizes()}")

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert output.request_id not in self.ends, f"{output.request_id} speaks after its end"
            self.outputs.append(output)
            self.answers.setdefault(output.request_id, []).extend(output.tokens)
            if output.finish is not None:
                self.ends[output.request_id] = output

    @property
    def hits(self) -> int:
        """Prefix hits in tokens, recomputation apart."""
        return sum(a.cached_tokens for plan in self.plans for a in plan.why.admitted if not a.recomputed)
