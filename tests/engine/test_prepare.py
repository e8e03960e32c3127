"""Preparing: a GGUF becomes the model that it was made from; a directory is checked; what cannot be used is said so."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, processors

from engine.errors import (
    CorruptModel,
    InferdError,
    MissingShard,
    ModelError,
    TokenizerError,
    UnknownArchitecture,
)
from engine.manifest import Manifest
from engine.modelspec import from_gguf_metadata
from engine.prepare import main, prepare
from engine.quant.blocks import Blocks
from engine.source import Source
from tests.fakes.ggufs import TEMPLATE, write_gguf
from tests.fakes.tiny import write_tiny

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}


def prepared(source: Path, target: Path, name: str = "tiny") -> Manifest:
    return prepare(Source.at(source), target, name, "", lambda stage, share: None)


def in_child(source: Path, target: Path) -> tuple[int, dict[str, Any], str]:
    """(exit code, last line, standard error) of `python -m engine.prepare`."""
    done = subprocess.run(
        [sys.executable, "-m", "engine.prepare", str(source), str(target)], capture_output=True, text=True, timeout=60
    )
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


# GGUF


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
    ids=["llama", "llama-tied", "llama-biases", "qwen2", "qwen3"],
)
def test_a_gguf_becomes_the_model_it_was_made_from(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    model = write_tiny(family, tmp_path / "hf", **SMALL, **overrides)
    theta = {"rope.freq_base": 10000.0}
    write_gguf(tmp_path / "m.gguf", family, model, values=theta)
    manifest = prepared(tmp_path / "m.gguf", tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    want = {
        k: v for k, v in model.state_dict().items() if k != "lm_head.weight" or not overrides.get("tie_word_embeddings")
    }
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    spec, reference = manifest.spec, prepared(tmp_path / "hf", tmp_path / "reference").spec
    assert (spec.family, spec.rope_theta, spec.head_dim) == (family, 10000.0, reference.head_dim)
    same = {k: v for k, v in reference.to_dict().items() if k != "rms_norm_eps"}
    assert {k: v for k, v in spec.to_dict().items() if k != "rms_norm_eps"} == same
    assert spec.rms_norm_eps == pytest.approx(reference.rms_norm_eps)
    assert manifest == Manifest.load(tmp_path / "out")
    assert manifest.parameters == sum(v.numel() for v in want.values())
    assert manifest.weights_bytes == 4 * manifest.parameters


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0])
def test_halves_stay_halves_and_blocks_stay_blocks(tmp_path: Path, kind: Type) -> None:
    """The reordering of q and k is undone in every one of them."""
    model = write_tiny("llama", tmp_path / "hf", **SMALL)
    write_gguf(tmp_path / "m.gguf", "llama", model, quantized=kind)
    manifest = prepared(tmp_path / "m.gguf", tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    dtype = {Type.F16: torch.float16, Type.BF16: torch.bfloat16, Type.Q8_0: torch.uint8}[kind]
    for name, tensor in model.state_dict().items():
        if tensor.dim() > 1:
            assert got[name].dtype == dtype
            if kind is Type.Q8_0:
                assert manifest.blocks[name] == "Q8_0"
                assert (Blocks(got[name], "Q8_0").plain() - tensor).abs().max() < tensor.abs().max() / 100
            else:
                assert torch.equal(got[name], tensor.to(dtype)), name
    assert set(manifest.bytes_by_dtype) == {"F32", kind.name}


def test_a_large_tensor_is_written_in_pieces_of_whole_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny("llama", tmp_path / "hf", **SMALL)
    write_gguf(tmp_path / "m.gguf", "llama", model)
    monkeypatch.setattr("engine.load.gguf._PIECE_BYTES", 1)
    prepared(tmp_path / "m.gguf", tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(got[name], tensor) for name, tensor in model.state_dict().items())


def test_what_else_the_manifest_says_of_a_gguf(tmp_path: Path) -> None:
    model = write_tiny("llama", tmp_path / "hf", **SMALL)
    write_gguf(tmp_path / "m.gguf", "llama", model, values={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    manifest = prepared(tmp_path / "m.gguf", tmp_path / "out")
    scaling = manifest.spec.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("linear", 4.0)
    assert (manifest.eos_token_ids, manifest.add_bos, manifest.has_chat_template) == ((0,), False, True)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE


def header(**values: Any) -> dict[str, Any]:
    """The metadata of a small llama."""
    numbers = {"embedding_length": 64, "block_count": 3, "feed_forward_length": 96, "context_length": 512}
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    given = {f"llama.{key.replace('__', '.')}": value for key, value in values.items()}
    return {"general.architecture": "llama", "llama.vocab_size": 320} | {
        f"llama.{key}": value for key, value in (numbers | heads).items()
    } | given  # fmt: skip


def test_llama3s_rotary_factors_come_from_their_tensor() -> None:
    factors = tuple(float(n) for n in range(1, 9))
    scaling = from_gguf_metadata(header(), tied=True, rope_factors=factors).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factors) == ("factors", factors)


def test_a_sliding_window_in_a_llama_makes_it_a_mistral() -> None:
    spec = from_gguf_metadata(header(attention__sliding_window=128), tied=True)
    assert (spec.family, spec.sliding_windows) == ("mistral", (128, 128, 128))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope__scaling__type": "yarn"}, "yarn"),
        ({"rope__dimension_count": 8}, "8 rotated"),
        ({"attention__value_length": 32}, "32 value"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UnknownArchitecture, match=said):
        from_gguf_metadata(header(**values), tied=True)


# what cannot be used: each a clear error and an exit code, and nothing is left behind


def gguf_of(tmp_path: Path, **how: Any) -> Path:
    model = write_tiny("llama", tmp_path / "hf", **SMALL)
    write_gguf(tmp_path / "m.gguf", how.pop("architecture", "llama"), model, **how)
    return tmp_path / "m.gguf"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def test_a_truncated_gguf(tmp_path: Path) -> None:
    source = gguf_of(tmp_path)
    cut(source)
    code, last, errors = in_child(source, tmp_path / "out" / "x")
    assert (code, last["kind"], errors) == (3, "CorruptModel", "")
    assert "its header promises" in last["error"]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ({"architecture": "gptneox"}, UnknownArchitecture, "'gptneox'.*served are llama, qwen2, qwen3"),
        ({"pre": "klingon"}, TokenizerError, "klingon"),
        ({"leave_out": "blk.1.ffn_up.weight"}, CorruptModel, "no tensor model.layers.1.mlp.up_proj.weight"),
        (
            {"values": {"feed_forward_length": 128}},
            CorruptModel,
            r"mlp.gate_proj.weight has shape \[96, 64\], expected",
        ),
    ],
    ids=["architecture", "pre-tokenizer", "tensor", "shape"],
)
def test_a_gguf_that_cannot_be_served(tmp_path: Path, how: dict[str, Any], kind: type[InferdError], said: str) -> None:
    with pytest.raises(kind, match=said) as caught:
        prepared(gguf_of(tmp_path, **how), tmp_path / "out" / "x")
    assert caught.value.exit_code == 3
    assert list((tmp_path / "out").iterdir()) == []


def test_a_gguf_without_a_template_is_prepared_for_completions(tmp_path: Path) -> None:
    manifest = prepared(gguf_of(tmp_path, template=None), tmp_path / "out")
    assert not manifest.has_chat_template


def test_a_disk_that_is_too_small_is_known_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = gguf_of(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(ModelError, match="1 MiB free"):
        prepared(source, tmp_path / "out" / "x")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ModelError, match="No space left"):
        prepared(gguf_of(tmp_path), tmp_path / "out" / "x")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_process_that_is_ended_takes_its_work_with_it(tmp_path: Path) -> None:
    """Ended when it reports the first tensors, with most of them still to come."""
    model = write_tiny("llama", tmp_path / "hf", num_hidden_layers=200)
    write_gguf(tmp_path / "m.gguf", "llama", model)
    words = [sys.executable, "-m", "engine.prepare", str(tmp_path / "m.gguf"), str(tmp_path / "out" / "x")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        next(line for line in child.stdout if '"weights"' in line)
        child.terminate()
        child.stdout.read()
    assert child.returncode == 128 + signal.SIGTERM
    assert list((tmp_path / "out").iterdir()) == []


def test_progress_is_json_and_ends_at_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(gguf_of(tmp_path)), str(tmp_path / "out")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1] == {"stage": "weights", "share": 1.0}
    shares = [line["share"] for line in lines if line["stage"] == "weights"]
    assert shares == sorted(shares)


# Hugging Face directories


def shard(directory: Path) -> None:
    """Its weights in two files and an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_directory_is_prepared_without_copying_its_weights(tmp_path: Path) -> None:
    write_tiny("qwen3", tmp_path / "hf", **SMALL)
    shard(tmp_path / "hf")
    manifest = prepared(tmp_path / "hf", tmp_path / "out")
    assert manifest.weight_paths(tmp_path / "out") == [
        tmp_path / "hf" / "a.safetensors",
        tmp_path / "hf" / "b.safetensors",
    ]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "chat_template.jinja",
        "manifest.json",
        "tokenizer.json",
    ]
    assert manifest.eos_token_ids == (0,)


def test_end_tokens_are_the_tokenizers_then_the_generation_configs(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "hf", **SMALL)
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0, 9]}))
    assert prepared(tmp_path / "hf", tmp_path / "out").eos_token_ids == (0, 7, 9)


def test_a_begin_mark_is_what_the_tokenizer_adds(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "hf", **SMALL)
    file = tmp_path / "hf" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(file))
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<|end|>"}))
    manifest = prepared(tmp_path / "hf", tmp_path / "out")
    assert (manifest.bos_token_id, manifest.add_bos, manifest.has_chat_template) == (bos, True, False)


@pytest.mark.parametrize("place", ["jinja", "json", "list"])
def test_a_chat_template_is_found_in_each_of_its_places(tmp_path: Path, place: str) -> None:
    directory = tmp_path / "hf"
    write_tiny("llama", directory, **SMALL)
    settings: dict[str, Any] = {"eos_token": "<|end|>"}
    if place == "jinja":
        (directory / "chat_template.jinja").write_text("T")
        settings["chat_template"] = "older"
    elif place == "json":
        (directory / "chat_template.json").write_text(json.dumps({"chat_template": "T"}))
    else:
        settings["chat_template"] = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    prepared(directory, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "T"


def without_shard(directory: Path) -> None:
    shard(directory)
    (directory / "b.safetensors").unlink()


def with_damaged_shard(directory: Path) -> None:
    shard(directory)
    cut(directory / "b.safetensors")


def only_pickles(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def configured(**changes: Any) -> Any:
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | changes))

    return change


def index_elsewhere(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../../secret"}}))


@pytest.mark.parametrize(
    ("damage", "kind", "said"),
    [
        (without_shard, MissingShard, "lacks 1 of 2 shards: b.safetensors"),
        (with_damaged_shard, CorruptModel, "b.safetensors is damaged: .* header promises"),
        (only_pickles, ModelError, "only pickled weights"),
        (index_elsewhere, CorruptModel, "lists no shards of this directory"),
        (configured(auto_map={"AutoModel": "x.py"}), UnknownArchitecture, "no remote code"),
        (configured(architectures=["MambaForCausalLM"]), UnknownArchitecture, "Mamba.*served are Llama"),
        (configured(num_hidden_layers=9), CorruptModel, "no tensor model.layers.2"),
        (lambda d: (d / "tokenizer.json").unlink(), TokenizerError, "no tokenizer.json"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), TokenizerError, "not usable"),
        (lambda d: (d / "config.json").write_text("{"), CorruptModel, "not readable JSON"),
        (lambda d: (d / "config.json").unlink(), CorruptModel, "no config.json"),
        (lambda d: (d / "model.safetensors").unlink(), MissingShard, "neither model.safetensors"),
    ],
)
def test_a_directory_that_cannot_be_served(tmp_path: Path, damage: Any, kind: type[InferdError], said: str) -> None:
    write_tiny("llama", tmp_path / "hf", **SMALL)
    damage(tmp_path / "hf")
    with pytest.raises(kind, match=said) as caught:
        prepared(tmp_path / "hf", tmp_path / "out" / "x")
    assert type(caught.value) is kind
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out" / "x").exists()


# sources


def test_a_fingerprint_changes_with_the_files_and_a_digest_with_their_content(tmp_path: Path) -> None:
    source = Source.at(gguf_of(tmp_path))
    quiet = lambda stage, share: None  # noqa: E731
    before = source.fingerprint(), source.digest(quiet)
    os.utime(source.path, ns=(1, 1))
    assert source.fingerprint() != before[0]
    assert source.digest(quiet) == before[1]
    directory = Source.at(tmp_path / "hf")
    before = directory.fingerprint(), directory.digest(quiet)
    os.utime(directory.weights[0], ns=(1, 1))
    assert directory.fingerprint() != before[0]
    assert directory.digest(quiet) != before[1]


def test_a_hub_files_own_digest_stands_for_its_time(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "hf", **SMALL)
    blob = tmp_path / ("0123456789abcdef" * 4)
    (tmp_path / "hf" / "model.safetensors").rename(blob)
    (tmp_path / "hf" / "model.safetensors").symlink_to(blob)
    before = Source.at(tmp_path / "hf").digest(lambda stage, share: None)
    os.utime(blob, ns=(1, 1))
    assert Source.at(tmp_path / "hf").digest(lambda stage, share: None) == before
