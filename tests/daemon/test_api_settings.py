"""Settings: sources and their order, provenance, refusals that name the nearest; and the command line around them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from daemon import cli, paths
from daemon.commands import serve
from daemon.settings import NAMES, byte_size, load
from engine.errors import ConfigError


def test_later_sources_win_and_every_value_says_where_it_came_from(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('port = 1\nhost = "file"\nmemory_limit = "1200MiB"\nallow_origin = ["https://a", "https://b"]\n')
    environ = {"INFERD_PORT": "2", "INFERD_GRACE": "7", "INFERD_PREFIX_CACHE": "off", "PATH": "/bin"}
    loaded = load({"port": "3", "dtype": None, "allow_origin": ()}, environ, str(file))
    settings = loaded.settings
    assert (settings.port, settings.host, settings.grace, settings.prefix_cache) == (3, "file", 7.0, False)
    assert settings.memory_limit == 1200 * 2**20
    assert settings.allow_origin == ("https://a", "https://b")
    assert loaded.provenance["port"] == "flag --port"
    assert loaded.provenance["grace"] == "env INFERD_GRACE"
    assert loaded.provenance["host"] == f"file {file}"
    assert loaded.provenance["dtype"] == "default"
    assert set(loaded.provenance) == set(NAMES)


def test_files_are_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    (tmp_path / "xdg" / "inferd").mkdir(parents=True)
    (tmp_path / "xdg" / "inferd" / "config.toml").write_text("port = 1")
    assert load({}, environ).settings.port == 1
    (tmp_path / "inferd.toml").write_text("port = 2")
    assert load({}, environ).settings.port == 2
    (tmp_path / "env.toml").write_text("port = 3")
    assert load({}, environ | {"INFERD_CONFIG": "env.toml"}).settings.port == 3
    (tmp_path / "flag.toml").write_text("port = 4")
    assert load({}, environ | {"INFERD_CONFIG": "env.toml"}, "flag.toml").settings.port == 4


def test_unknown_names_fail_with_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("max_num_seq = 5")
    with pytest.raises(ConfigError, match=r"max_num_seq.*did you mean max_num_seqs"):
        load({}, {}, str(file))
    with pytest.raises(ConfigError, match=r"INFERD_MEMORY_LIMITS.*did you mean memory_limit"):
        load({}, {"INFERD_MEMORY_LIMITS": "1"})
    file.write_text("[serve]\nport = 1")
    with pytest.raises(ConfigError, match="unknown setting 'serve'"):
        load({}, {}, str(file))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "x"),
        ("port", 65536),
        ("port", True),
        ("memory_limit", "12 parsecs"),
        ("grace", "nan"),
        ("grace", -1),
        ("device", "tpu"),
        ("max_num_seqs", 0),
        ("prefix_cache", "perhaps"),
        ("allow_origin", [1]),
        ("host", ""),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_its_source(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} \(flag --{name.replace('_', '-')}\): expected"):
        load({name: value}, {})


def test_an_unreadable_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("port = = 1")
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe")
    for name in ("bad.toml", "latin.toml", "none.toml", "."):
        with pytest.raises(ConfigError, match="cannot read"):
            load({}, {}, str(tmp_path / name))


def test_kubernetes_service_variables_are_not_ours() -> None:
    environ = {
        "INFERD_PORT": "tcp://10.0.0.1:8000",
        "INFERD_SERVICE_HOST": "10.0.0.1",
        "INFERD_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert load({}, environ).settings.port == 8000


@pytest.mark.parametrize(
    ("text", "count"), [("1200MiB", 1200 << 20), ("1.5 GB", 1_500_000_000), ("2g", 2 * 10**9), ("4096", 4096), (7, 7)]
)
def test_byte_sizes(text: str | int, count: int) -> None:
    assert byte_size(text) == count


def test_secrets_are_not_shown() -> None:
    loaded = load({}, {"INFERD_API_KEY": "sk-secret"})
    assert "sk-secret" not in str(loaded.public())
    assert loaded.public()["api_key"] == {"value": "(set)", "source": "env INFERD_API_KEY"}


def test_every_flag_of_serve_is_a_setting() -> None:
    own = {"model", "config", "profile", "check", "plan"}
    assert {p.name for p in serve.command.params} - own <= set(NAMES)


def test_errors_are_one_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", "--port", "x"]) == 2
    assert cli.run(["serve", "--config", "/nonexistent.toml"]) == 2
    assert cli.run(["--version"]) == 0
    assert cli.run(["no-such-command"]) == 2
    seen = capsys.readouterr()
    assert seen.err.splitlines()[0] == "inferd: port (flag --port): expected a whole number"
    assert "Traceback" not in seen.err
    assert seen.out.startswith("inferd ")


def test_help_lists_every_command_without_importing_any(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from daemon.cli import run; run(['--help']); assert 'aiohttp' not in sys.modules, 'slow'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    for file in Path(cli.__file__).parent.joinpath("commands").glob("[a-z]*.py"):
        assert f"\n  {file.stem} " in done.stdout


def test_a_foreign_package_of_our_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import daemon

    monkeypatch.setattr(daemon, "DaemonContext", object, raising=False)
    assert cli.run(["--version"]) == 1


def test_directories_follow_systemd_then_xdg_and_must_be_private(tmp_path: Path) -> None:
    assert paths.runtime_dir({"RUNTIME_DIRECTORY": f"{tmp_path}/a:{tmp_path}/b"}) == tmp_path / "a"
    assert paths.runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "inferd"
    assert paths.state_dir({"STATE_DIRECTORY": f"{tmp_path}/s"}) == tmp_path / "s"
    assert paths.state_dir({"HOME": str(tmp_path)}) == tmp_path / ".local" / "state" / "inferd"
    (tmp_path / "inferd").chmod(0o777)
    with pytest.raises(ConfigError, match="alone"):
        paths.runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_one_daemon_per_state_directory(tmp_path: Path) -> None:
    with paths.lock(tmp_path):
        holder = f"from pathlib import Path; from daemon import paths\nwith paths.lock(Path({str(tmp_path)!r})): pass"
        done = subprocess.run([sys.executable, "-c", holder], capture_output=True, text=True, timeout=30)
        assert done.returncode == 1
        assert f"another inferd (pid {os.getpid()})" in done.stderr
    with paths.lock(tmp_path):
        pass


# A daemon process around a scripted engine: what signals do to a real process.
_PROCESS = """
import asyncio, sys
from pathlib import Path
from tests.fakes.daemon import ScriptedEngine
from tests.fakes.port import saying
from tests.fakes.text import ByteText
from daemon import logs
from daemon.house import Model
from daemon.serving import Daemon
from daemon.settings import load
async def main():
    return await Daemon(
        load({"port": 0, "grace": 20}, environ={}), Model(name="tiny", text=ByteText(), eos_token_ids=()),
        lambda publish: ScriptedEngine(saying("x" * 50, hang_after=3)), runtime_dir=Path(sys.argv[1]),
        state_dir=Path(sys.argv[1]), version="0", on_listening=lambda where: print(where.api, flush=True)).run()
logs.configure("json", "info")
sys.exit(asyncio.run(main()))
"""


def test_a_second_interrupt_ends_at_once_and_one_alone_drains(tmp_path: Path) -> None:
    import urllib.request

    for stuck in (False, True):
        process = subprocess.Popen(
            [sys.executable, "-c", _PROCESS, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().strip()
        if stuck:  # a request that will not end by itself
            body = b'{"model":"tiny","prompt":"x","max_tokens":50,"stream":true}'
            while True:
                try:
                    ask = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
                    answer = urllib.request.urlopen(ask, timeout=60)
                    break
                except urllib.error.HTTPError as error:
                    assert error.code == 503
            assert answer.readline().startswith(b"data: ")
        process.send_signal(signal.SIGINT)
        if stuck:
            for line in process.stderr:
                if "draining" in line:
                    break
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == (130 if stuck else 0)
        process.stdout.close()
        process.stderr.close()


def test_a_profile_precedes_the_file_and_yields_to_the_environment(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("max_num_seqs = 8\nblock_size = 32\nport = 1234\n")
    (tmp_path / "found.toml").write_text("max_num_seqs = 24\nthreads = 2\n")
    loaded = load(
        environ={"INFERD_THREADS": "1"}, config=str(tmp_path / "own.toml"), profile=str(tmp_path / "found.toml")
    )
    settings = loaded.settings
    assert (settings.max_num_seqs, settings.block_size, settings.threads, settings.port) == (24, 32, 1, 1234)
    assert loaded.provenance["max_num_seqs"] == f"profile {tmp_path / 'found.toml'}"
