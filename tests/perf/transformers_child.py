"""transformers as a baseline, in a process of its own: `python -m tests.perf.transformers_child GGUF DTYPE`.

Reads one JSON request a line from stdin, writes one JSON answer a line to stdout: {"prompts": [[ids]…], "tokens": N} →
{"seconds": s} of one static-batch greedy `generate`; {"measure": true} → this machine's bandwidth and GEMM rate.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

_COPIED_BYTES = 512 << 20  # far beyond any cache
_GEMM_SIZE = 1536


def rates() -> dict[str, float]:
    """The best of five: bytes read a second (summing a large tensor), flops a second of an fp32 product."""
    large = torch.ones(_COPIED_BYTES // 4)
    left, right = torch.randn(_GEMM_SIZE, _GEMM_SIZE), torch.randn(_GEMM_SIZE, _GEMM_SIZE)
    reading, multiplying = [], []
    for _ in range(5):
        began = time.perf_counter()
        large.sum()
        reading.append(time.perf_counter() - began)
        began = time.perf_counter()
        torch.mm(left, right)
        multiplying.append(time.perf_counter() - began)
    return {
        "bandwidth_bytes_per_s": _COPIED_BYTES / min(reading),
        "gemm_flops_per_s": 2 * _GEMM_SIZE**3 / min(multiplying),
    }


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], tokens: int) -> float:
    """Seconds of one greedy batch; prompts must be of one length, and every row gets all its tokens."""
    ids = torch.tensor(prompts)
    began = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
    )
    seconds = time.perf_counter() - began
    assert out.shape == (len(prompts), ids.shape[1] + tokens)
    return seconds


def main(gguf: Path, dtype: str) -> None:
    """Load once, then answer until stdin ends."""
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
    model = loaded.eval()
    generate(model, [[1, 2]], 2)  # the first one pays for what later ones find ready
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"parameters": parameters, "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = rates() if "measure" in asked else {"seconds": generate(model, asked["prompts"], asked["tokens"])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
