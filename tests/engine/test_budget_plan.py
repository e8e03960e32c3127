"""The memory plan: it sums, it explains itself, it picks what fits and refuses what does not by name."""

import re
from dataclasses import fields, replace

import pytest

from engine.budget import Limits, Resolved, holds, memory_plan, resolve
from engine.config import EngineConfig
from engine.errors import ConfigError, DoesNotFit
from engine.machine import ActivationCost, MachineFacts, host_facts
from engine.manifest import Manifest
from engine.modelspec import ModelSpec

GIB, MIB = 1 << 30, 1 << 20
SPEC = ModelSpec(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position=8192,
    tie_embeddings=True,
)
MANIFEST = Manifest(
    spec=SPEC,
    digest="d",
    source="test",
    name="small",
    weights=(),
    weights_dtype="float32",
    weights_bytes=0,
    parameters=134_515_008,
    bytes_by_dtype={},
)
MACHINE = MachineFacts(
    device="cpu",
    device_name="a CPU",
    total_bytes=24 * GIB,
    available_bytes=22 * GIB,
    cgroup_limit_bytes=None,
    threads=2,
    threads_reason="two cores",
    dtype="float32",
    dtype_reason="no native bf16",
    runtime_bytes=320 * MIB,
    weights_bytes=MANIFEST.parameters * 4,
    activation=ActivationCost.estimate(SPEC, "float32"),
)


def plan(machine: MachineFacts = MACHINE, **asked: object) -> tuple[Resolved, Limits]:
    return resolve(EngineConfig.from_dict({"model_dir": "x", **asked}), MANIFEST, machine)


@pytest.mark.parametrize("limit", [None, 1000 * MIB, 1200 * MIB, 2 * GIB, 8 * GIB, 24 * GIB])
def test_the_plan_sums_to_the_limit_and_no_owner_is_negative(limit: int | None) -> None:
    resolved, limits = plan(memory_limit_bytes=limit)
    rows = memory_plan(resolved)
    assert sum(row.bytes for row in rows) == resolved.memory_limit_bytes
    assert all(row.bytes >= 0 and row.reason for row in rows)
    assert resolved.memory_limit_bytes <= (limit or MACHINE.total_bytes)
    assert limits.within(resolved) == limits


@pytest.mark.parametrize("limit", [None, 1000 * MIB, 4 * GIB])
def test_every_resolved_field_has_a_reason(limit: int | None) -> None:
    resolved, _ = plan(memory_limit_bytes=limit)
    names = {f.name for f in fields(Resolved)} - {"reasons"}
    assert set(resolved.reasons) == names
    assert all(len(reason) > 1 for reason in resolved.reasons.values())


def test_without_a_limit_a_cpu_does_not_give_the_whole_machine() -> None:
    resolved, _ = plan()
    assert resolved.kv_blocks * resolved.kv_block_bytes <= 0.25 * MACHINE.available_bytes
    assert "--memory-limit" in resolved.reasons["memory_limit_bytes"]


def test_the_tightest_limit_counts_and_is_named() -> None:
    caged = replace(MACHINE, cgroup_limit_bytes=2 * GIB)
    assert plan(caged)[0].memory_limit_bytes == 2 * GIB
    assert "control group" in plan(caged)[0].reasons["memory_limit_bytes"]
    resolved, _ = plan(caged, memory_limit_bytes=1500 * MIB)
    assert resolved.memory_limit_bytes == 1500 * MIB
    assert "--memory-limit" in resolved.reasons["memory_limit_bytes"]


def test_a_pool_larger_than_all_rows_can_use_is_not_reserved() -> None:
    resolved, _ = plan(memory_limit_bytes=24 * GIB, max_num_seqs=2, max_model_len=1024)
    assert resolved.kv_blocks == 2 * 1024 // resolved.block_size


def test_auto_context_is_the_largest_that_fits_and_says_so() -> None:  # case 10
    resolved, _ = plan(memory_limit_bytes=1000 * MIB)
    assert 0 < resolved.max_model_len < SPEC.max_position
    assert "longest that fits" in resolved.reasons["max_model_len"]
    assert resolved.kv_blocks * resolved.block_size >= resolved.max_model_len
    one_more = resolved.max_model_len + resolved.block_size
    with pytest.raises(DoesNotFit):
        plan(memory_limit_bytes=1000 * MIB, max_model_len=one_more)


def test_an_explicit_context_that_cannot_fit_is_refused_with_the_largest_that_does() -> None:  # case 10
    with pytest.raises(DoesNotFit) as refused:
        plan(memory_limit_bytes=1000 * MIB, max_model_len=8192)
    said = re.search(r"needs (\d+) MiB more", refused.value.message)
    assert said is not None
    named = re.fullmatch(r"lower --max-model-len to (\d+), or give it --memory-limit (\d+)MiB", refused.value.hint)
    assert named is not None
    largest, least_mib = int(named[1]), int(named[2])
    assert abs(1000 + int(said[1]) - least_mib) <= 1
    assert plan(memory_limit_bytes=least_mib * MIB, max_model_len=8192)[0].max_model_len == 8192
    resolved, _ = plan(memory_limit_bytes=1000 * MIB, max_model_len=largest)
    assert resolved.max_model_len == largest
    with pytest.raises(DoesNotFit):
        plan(memory_limit_bytes=1000 * MIB, max_model_len=largest + resolved.block_size)


def test_what_the_pool_holds_is_said_in_tokens_and_requests() -> None:
    resolved, _ = plan(memory_limit_bytes=2 * GIB)
    tokens = resolved.kv_blocks * resolved.block_size
    assert f"{tokens} tokens: {tokens // 8192} requests of 8192 tokens, or {tokens // 1024} of 1024" in holds(resolved)


def test_when_the_weights_alone_do_not_fit_the_least_limit_is_named_and_is_enough() -> None:
    with pytest.raises(DoesNotFit) as refused:
        plan(memory_limit_bytes=600 * MIB)
    least_mib = int(refused.value.hint.split("--memory-limit ")[1].split("MiB")[0])
    assert plan(memory_limit_bytes=least_mib * MIB)[0].max_model_len >= 1


@pytest.mark.parametrize("setting", ["max_num_seqs", "max_num_batched_tokens"])
def test_when_what_was_asked_for_is_too_much_the_hint_says_to_lower_it(setting: str) -> None:
    flag = f"--{setting.replace('_', '-')}"
    with pytest.raises(DoesNotFit) as refused:
        plan(**{setting: 10_000_000})
    assert f"lower {flag}" in refused.value.hint
    with pytest.raises(DoesNotFit) as unasked:
        plan(memory_limit_bytes=600 * MIB)
    assert "lower" not in unasked.value.hint


def test_rows_and_tokens_shrink_before_the_context_does_unless_asked_for() -> None:
    resolved, _ = plan(memory_limit_bytes=1200 * MIB)
    assert resolved.rows < plan()[0].rows
    assert "lowered" in resolved.reasons["rows"]
    fixed, _ = plan(memory_limit_bytes=1200 * MIB, max_num_seqs=64, max_num_batched_tokens=512)
    assert (fixed.rows, fixed.step_tokens) == (64, 512)
    assert fixed.max_model_len < resolved.max_model_len


def test_a_context_beyond_the_models_positions_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="8192 positions"):
        plan(max_model_len=8193)


def test_prompt_logprobs_and_logits_are_counted() -> None:  # case 1: the plan at start counts them
    cost = ActivationCost.estimate(SPEC, "float32")
    logits = SPEC.vocab_size * 4
    assert cost.peak(512, 64, 8192) > (64 + 32) * logits
    assert cost.peak(1, 2, 1) - cost.peak(1, 1, 1) >= logits


@pytest.mark.parametrize(
    ("field", "value"), [("max_num_seqs", 0), ("kv_blocks", 10**9), ("context_limit", 8193), ("spec_depth", 1)]
)
def test_limits_outside_the_ceilings_are_refused_by_name(field: str, value: int) -> None:
    resolved, limits = plan()
    with pytest.raises(ConfigError, match=field):
        limits.replaced({field: value}).within(resolved)


def test_host_facts_are_of_this_machine() -> None:
    facts = host_facts(EngineConfig(model_dir="x", daemon_bytes=1000, threads=3), MANIFEST, runtime_bytes=5)
    assert facts.runtime_bytes == 1005
    assert facts.threads == 3
    assert 0 < facts.available_bytes <= facts.total_bytes


def test_the_head_of_tied_embeddings_is_counted_where_it_is_prepacked(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(tied: bool) -> int:
        manifest = replace(MANIFEST, spec=replace(SPEC, tie_embeddings=tied))
        return host_facts(EngineConfig(model_dir="x", dtype="float32"), manifest, runtime_bytes=5).weights_bytes

    assert weights(tied=True) < weights(tied=False)  # packed, one copy is both
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert weights(tied=True) - weights(tied=False) == SPEC.vocab_size * SPEC.hidden_size * 4


def test_the_plan_counts_the_rows_and_the_table_of_positions() -> None:
    resolved, _ = plan(max_model_len=512, max_num_seqs=4)
    rows, rope = 4 * 8 * (513 + 33), 2 * 513 * SPEC.head_dim * 4
    assert resolved.workspace_bytes == rows + rope
    assert "rows" in resolved.reasons["workspace_bytes"]
