"""Reports made up for tests: every kind of plot has something to show."""

import math
import random

from daemon.lab.record import Effect, Mark, Report, Request, Run, Series, Verdict

MIB = 1 << 20


def run(side: str = "short", seconds: float = 60.0, repeat: int = 0, ttft_s: float = 0.1, drift: float = 0.0) -> Run:
    """Steady but for `drift`: the share that memory and latencies grow from the begin to the end."""
    rng = random.Random(f"{side}:{repeat}")
    at_s = tuple(float(n) for n in range(int(seconds)))
    grown = [1 + drift * at / seconds for at in at_s]

    def series(name: str, unit: str, level: float, grows: bool = False) -> Series:
        values = tuple(level * (g if grows else 1.0) * rng.uniform(0.99, 1.01) for g in grown)
        return Series(name=name, unit=unit, at_s=at_s, values=values)

    requests = tuple(
        Request(
            at_s=n * seconds / 240,
            kind="long" if n % 5 == 0 else "short",
            prompt_tokens=100,
            output_tokens=32 + n % 64,
            ttft_s=ttft_s * (1 + drift * n / 240) * rng.uniform(0.9, 1.1),
            whole_s=1.0 + (32 + n % 64) / 50,
            gap_s=0.02 * rng.uniform(0.9, 1.1),
            longest_gap_s=0.05,
            error="timeout" if n == 17 else "",
        )
        for n in range(240)
    )
    return Run(
        side=side,
        repeat=repeat,
        seconds=seconds,
        settings={"max_num_seqs": 8},
        figures={
            "output_tokens_per_s": 100.0 * rng.uniform(0.98, 1.02),
            "ttft_p95_s": ttft_s * rng.uniform(0.98, 1.02),
            "inter_token_p95_s": 0.02,
            "peak_in_use_bytes": 600.0 * MIB,
        },
        series=(
            series("memory.weights", "bytes", 100 * MIB),
            series("memory.runtime", "bytes", 200 * MIB, grows=True),
            series("memory.kv_active", "bytes", 50 * MIB),
            series("memory.in use", "bytes", 350 * MIB, grows=True),
            series("process.engine", "bytes", 300 * MIB, grows=True),
            series("queue.running", "requests", 8),
            series("queue.waiting", "requests", 2),
            series("kv.active", "blocks", 100),
            series("limits.max_num_batched_tokens", "count", 512),
            series("limits.kv_blocks", "count", 600),
            series("limits.max_num_seqs", "count", 16),
            series("rate.decode", "tokens/s", 100),
        ),
        requests=requests,
        gaps={"0.01": 5, "0.0133": 90, "0.0178": 40},
        marks=(Mark(at_s=20.0, label="knee: max_num_seqs 16 → 12", detail="<b>past the knee</b>"),),
        limit_bytes=600 * MIB,
    )


def report(*runs: Run, **changes: object) -> Report:
    """Whatever is not given is filled in."""
    fields: dict[str, object] = {
        "kind": "load",
        "title": "A <made up> report",
        "started_at": "2026-01-01T00:00:00Z",
        "model": "tiny",
        "versions": {"inferd": "0.1.0"},
        "settings": {"memory_limit": 600 * MIB},
        "seeds": (1,),
        "machine": {"cpu": "a CPU", "cores": 2},
        "runs": runs or (run(),),
        "verdicts": (Verdict(name="steady", passed=True, why="nothing drifts"),),
    }
    return Report(**{**fields, **changes})  # type: ignore[arg-type]


def ablated() -> Report:
    """Three sides, three repetitions each, and what came of them."""
    sides = {"all on": 0.1, "prefix cache off": 0.2, "paged KV off": 0.1}
    effects = tuple(
        Effect(figure="ttft_p95_s", side=side, against="all on", ratio=ratio, low=low, high=high, noise=noise)
        for side, ratio, low, high, noise in (
            ("prefix cache off", 2.0, 1.8, 2.2, False),
            ("paged KV off", 1.0, 0.9, 1.1, True),
        )
    )
    runs = [run(side, repeat=n, ttft_s=ttft_s) for n in range(3) for side, ttft_s in sides.items()]
    return report(*runs, kind="ablation", effects=effects)


def waves(count: int, level: float, slope: float, seed: int = 1) -> list[tuple[float, float]]:
    """A noisy, wavy line with a trend."""
    rng = random.Random(seed)
    return [(n, level + slope * n + level * 0.02 * (math.sin(n / 5) + rng.gauss(0, 0.5))) for n in range(count)]
