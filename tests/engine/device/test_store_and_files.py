"""The pool gives memory back for real; files that are not right are refused before memory is taken; frequencies."""

import dataclasses
import json
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.device.meter import HostMeter
from engine.device.start import start
from engine.errors import CorruptModel, MissingShard
from engine.kv.store import KVStore
from engine.layers.rotary import rope_tables
from engine.load.checkpoint import Checkpoint
from engine.machine import host_facts
from engine.manifest import Manifest
from engine.modelspec import RopeScaling, from_hf_config
from telemetry.residency import heap
from tests.fakes.tiny import prepare_tiny, write_tiny


@dataclasses.dataclass
class Shape:
    """The part of Resolved that the store reads."""

    kv_blocks: int = 1024
    block_size: int = 16
    kv_dtype: str = "float32"
    device: str = "cpu"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    directory = tmp_path_factory.mktemp("files")
    return directory, prepare_tiny(directory, write_tiny("llama", directory))


def resident_bytes() -> int:
    rollup = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(rollup[1]) - int(rollup[2])) * 4096  # anonymous: shared ones are files


def test_discarded_blocks_leave_the_process(tiny: tuple[Path, Manifest]) -> None:
    spec = dataclasses.replace(tiny[1].spec, head_dim=64, num_layers=4)
    before = resident_bytes()
    store = KVStore(spec, Shape())  # type: ignore[arg-type]
    assert store.bytes == 4 * 2 * 2 * 1024 * 16 * 64 * 4
    assert resident_bytes() - before < store.bytes / 10, "pages exist once they are written"
    for tensor in (*store.keys, *store.values):
        tensor.fill_(1.0)
    full = resident_bytes()
    assert full - before > store.bytes * 0.9
    store.discard(tuple(range(100, 900)))
    assert full - resident_bytes() > store.bytes * 0.75
    kept = torch.cat([torch.arange(0, 100 * 16), torch.arange(900 * 16, 1024 * 16)])
    assert all((tensor[:, kept] == 1.0).all() for tensor in (*store.keys, *store.values)), "others' blocks are whole"
    assert all((tensor[:, 1600:14400] == 0.0).all() for tensor in (*store.keys, *store.values))


def test_blocks_smaller_than_a_page_are_never_torn(tiny: tuple[Path, Manifest]) -> None:
    """Only whole pages go: what shares a page with a kept block stays."""
    store = KVStore(tiny[1].spec, Shape(kv_blocks=64, block_size=4))  # type: ignore[arg-type]
    for tensor in (*store.keys, *store.values):
        tensor.fill_(1.0)
    store.discard((3, 5, 6, 7, 8, 9, 10, 40))
    kept = torch.tensor([b * 4 + i for b in range(64) if b not in {3, 5, 6, 7, 8, 9, 10, 40} for i in range(4)])
    assert all((tensor[:, kept] == 1.0).all() for tensor in (*store.keys, *store.values))


def test_copy_is_of_one_block_in_every_layer(tiny: tuple[Path, Manifest]) -> None:
    store = KVStore(tiny[1].spec, Shape(kv_blocks=8, block_size=4))  # type: ignore[arg-type]
    for index, tensor in enumerate((*store.keys, *store.values)):
        tensor.copy_(torch.arange(32.0)[None, :, None] + 100 * index)
    store.copy(2, 5)
    for index, tensor in enumerate((*store.keys, *store.values)):
        expected = torch.arange(32.0) + 100 * index
        expected[20:24] = expected[8:12].clone()
        assert torch.equal(tensor, expected[None, :, None].expand_as(tensor))


def refused(directory: Path, manifest: Manifest, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> str:
    """Starting fails with `error` before one tensor is read; gives its text."""

    def read(self: Checkpoint, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "tensor", read)
    with pytest.raises(error) as caught:
        start(EngineConfig(model_dir=str(directory)), manifest, directory, lambda *_: None)
    return str(caught.value)


def test_a_missing_shard(tiny: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = dataclasses.replace(tiny[1], weights=("model.safetensors", "model-00002.safetensors"))
    assert "model-00002.safetensors" in refused(tiny[0], manifest, MissingShard, monkeypatch)


@pytest.mark.parametrize("length", [0, 5, 100, -1, -4000])
def test_a_truncated_file(
    tiny: tuple[Path, Manifest], tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (tiny[0] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:length])
    assert "model.safetensors" in refused(tmp_path, tiny[1], CorruptModel, monkeypatch)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_layers": 4}, "model.layers.3"),
        ({"intermediate_size": 128}, "gate_proj.weight"),
        ({"num_kv_heads": 4}, "k_proj.weight"),
        ({"attention_bias": True}, "q_proj.bias"),
        ({"vocab_size": 321}, "embed_tokens"),
    ],
)
def test_weights_of_another_model(
    tiny: tuple[Path, Manifest], change: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = dataclasses.replace(tiny[1], spec=dataclasses.replace(tiny[1].spec, **change))
    assert named in refused(tiny[0], manifest, CorruptModel, monkeypatch)


def test_nothing_keeps_the_file_mapped(tiny: tuple[Path, Manifest]) -> None:
    """Or all of it would count as resident beside the packed weights; and a file removed under us would be a SIGBUS."""
    started = start(EngineConfig(model_dir=str(tiny[0])), tiny[1], tiny[0], lambda *_: None)
    assert str(tiny[0]) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    started.runner.close()


def test_weights_are_booked_as_they_are_resident(tiny: tuple[Path, Manifest]) -> None:
    """As the plan made without starting says, packed or not."""
    for dtype in ("float32", "bfloat16"):
        config = EngineConfig(model_dir=str(tiny[0]), dtype=dtype)
        running = start(config, tiny[1], tiny[0], lambda *_: None)
        started = running.resolved
        assert started.workspace_bytes == running.runner.workspace_bytes
        assert started.weights_bytes == host_facts(config, tiny[1]).weights_bytes
    assert started.weights_bytes == tiny[1].parameters * 2


def test_the_peak_of_a_step_is_what_it_held_beside_the_pool() -> None:
    with mmap.mmap(-1, 64 << 20) as pool:
        meter = HostMeter((torch.frombuffer(pool, dtype=torch.uint8).data_ptr(), len(pool)))
        free = heap()
        spare = free.free_bytes if free else 0  # counts as used, whatever the tests before have left there
        with meter.step():
            pool[: 32 << 20] = b"x" * (32 << 20)
            scratch = torch.ones(48 << 20, dtype=torch.uint8)
            del scratch
        # The 32 MiB of Python's own bytes were a step's too; what the pool took was not.
        assert 40 << 20 < meter.peak_bytes < (72 << 20) + spare
        with meter.step():
            pass
        assert meter.peak_bytes == 0, "measured a moment ago"


def test_factors_are_llama3_scaling_worked_out(tiny: tuple[Path, Manifest]) -> None:
    """A GGUF keeps one divisor a frequency where config.json has four numbers: the same angles."""
    config = json.loads((tiny[0] / "config.json").read_text(encoding="utf-8"))
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    spec = from_hf_config({**config, "rope_parameters": {**rope, "original_max_position_embeddings": 64}})
    plain, cpu = dataclasses.replace(spec, rope_scaling=None), torch.device("cpu")
    divisors = []
    for index in range(spec.head_dim // 2):
        wave = 2 * torch.pi * spec.rope_theta ** (2 * index / spec.head_dim)
        if wave < 64 / 4.0:
            divisors.append(1.0)
        elif wave > 64 / 1.0:
            divisors.append(4.0)
        else:
            kept = (64 / wave - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - kept) / 4.0 + kept))
    scaled = RopeScaling(kind="factors", factor=1.0, factors=tuple(divisors))
    ours = rope_tables(spec, 40, cpu, torch.float32)
    other = rope_tables(dataclasses.replace(plain, rope_scaling=scaled), 40, cpu, torch.float32)
    for a, b in zip(ours, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    assert not torch.allclose(ours[0], rope_tables(plain, 40, cpu, torch.float32)[0], atol=1e-3)
