"""Ablation: the table covers every switch of the engine; a real one of a tiny model, and what its report says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.lab import features, record
from daemon.lab.ablate import effects
from daemon.lab.features import ALL_OFF, ALL_ON, TABLE, against, chosen, sides
from daemon.lab.mixture import mixture
from daemon.lab.side import _CODE
from daemon.load.workload import Sizer, Workload
from engine.config import FEATURES
from tests.daemon.lab import made
from tests.fakes.tiny_served import tiny_model
from tests.served import INFERD, ROOT

BASE = {"max_model_len": 512, "max_num_seqs": 8, "tuner": False}


def test_every_switch_of_the_engine_has_a_line_in_the_table() -> None:
    assert {feature.without for feature in TABLE if feature.without} == set(FEATURES)


def test_sides_differ_by_their_feature_alone() -> None:
    made_sides = sides(chosen([]), True, BASE)
    assert len(made_sides) == 2 + 2 * len(TABLE)
    assert made_sides[ALL_ON] == {**BASE, "without": ()}
    assert made_sides["paged KV off"] == {**BASE, "without": ("paged_kv",)}
    assert made_sides["chunked prefill off"]["max_num_batched_tokens"] == 520
    assert made_sides["prefix cache off"]["prefix_cache"] is False
    assert "prefix_cache" not in made_sides["prefix cache alone"]
    assert set(made_sides["paged KV alone"]["without"]) == set(FEATURES) - {"paged_kv"}
    assert {against(side) for side in made_sides} == {ALL_ON, ALL_OFF}


def test_one_feature_has_two_sides() -> None:
    assert list(sides(chosen(["paged-kv"]), True, BASE)) == [ALL_ON, "paged KV off"]
    assert len(features.NAMES) == len(TABLE)


def test_the_load_gives_every_feature_something_to_do() -> None:
    load = Workload(mixture(1000), 3, Sizer())
    asked = [load.request(n) for n in range(200)]
    assert asked == [load.request(n) for n in range(200)], "the same seed, the same requests"
    assert max(one.prompt_tokens + one.max_tokens for one in asked) < 1000
    beginnings = [one.prompt[:200] for one in asked if one.kind == "shared"]
    assert len(set(beginnings)) == 2
    assert {one.kind for one in asked} == {"shared", "short", "long"}
    assert max(one.max_tokens for one in asked) > 5 * min(one.max_tokens for one in asked)


def test_effects_are_judged_by_pairs() -> None:
    found = {(e.side, e.figure): e for e in effects(made.ablated())}
    assert found["prefix cache off", "ttft_p95_s"].noise is False
    assert found["prefix cache off", "ttft_p95_s"].ratio == pytest.approx(2, rel=0.1)
    assert found["paged KV off", "ttft_p95_s"].noise is True


@pytest.mark.timeout(300)
def test_a_real_ablation_of_a_tiny_model(tmp_path: Path) -> None:
    """Every side is a daemon of its own that answers every request; none that only schedules differently answers
    differently."""
    model = tiny_model(tmp_path / "model")
    flags = ["--requests", "8", "--concurrency", "4", "--repeats", "1", "--longest", "512", "--rows", "4"]
    what = ["--no-alone", "--feature", "paged-kv", "--feature", "fast-attention", "--feature", "chunked-prefill"]
    target = tmp_path / "ablation.html"
    done = subprocess.run(
        [*INFERD, "bench", "ablate", str(model), *flags, *what, "--report", str(target), "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    report = record.load(tmp_path / "ablation.json")
    assert json.loads(done.stdout)["kind"] == "ablation"
    assert report.sides == [ALL_ON, "paged KV off", "chunked prefill off", "fast attention off", ALL_OFF]
    assert all(run.figures["failed"] == 0 and run.figures["requests"] == 8 for run in report.runs)
    assert all("peak_kv_active_bytes" in run.figures and run.series for run in report.runs)
    for side in (ALL_ON, "paged KV off", "chunked prefill off"):
        assert report.values(side, "same_answers") == [1.0], "what is scheduled differently is not answered differently"
    assert all(effect.noise is None for effect in report.effects), "one repetition"
    assert "Memory in use over time" in target.read_text()


def test_a_side_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    done = subprocess.run(
        [*INFERD, "bench", "ablate", str(model), "--memory-limit", "1MiB", "--longest", "512"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=110,
    )
    assert done.returncode == 1
    assert "does not fit" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_side_whose_laboratory_died_before_it_began_ends_at_once() -> None:
    """The kernel tells nobody of a parent that is dead already."""
    nobody = subprocess.run([sys.executable, "-c", _CODE, "1", "--help"], cwd=ROOT, capture_output=True, timeout=60)
    assert nobody.returncode == 70
