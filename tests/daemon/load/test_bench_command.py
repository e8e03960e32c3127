"""`inferd bench load` as a user runs it: a process, its output, its exit code."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from daemon.commands.bench import command
from tests.fakes.openai_server import FakeOpenAI, serving

BENCH = [sys.executable, "-c", "from daemon.commands.bench import command; command()", "load"]


async def bench(repo: Path, *flags: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *BENCH, *flags, cwd=repo, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_text_json_and_an_api_key(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    async with serving(FakeOpenAI(api_key="secret")) as url:
        flags = ("--url", f"{url}/v1", "--requests", "6", "--concurrency", "2", "--api-key-env", "A_KEY")
        code, text, _ = await bench(repo, *flags)
        json_code, data, _ = await bench(repo, *flags, "--json")
    assert (code, json_code) == (0, 0)
    assert "6 ok, 0 failed" in text
    report = json.loads(data)
    assert report["requests"]["ok"] == 6
    assert report["prompt_sizes"] == "tokenize"
    assert report["model"] == "fake"


@pytest.mark.parametrize("flags", [(), ("--ignore-eos",)])
async def test_answers_as_long_as_asked_for_are_asked_for(repo: Path, flags: tuple[str, ...]) -> None:
    fake = FakeOpenAI()
    async with serving(fake) as url:
        code, _, _ = await bench(repo, "--url", url, "--requests", "2", *flags)
    assert code == 0
    assert [body.get("ignore_eos", False) for body in fake.bodies] == [bool(flags)] * 2


async def test_an_open_loop_runs_for_its_duration(repo: Path) -> None:
    async with serving(FakeOpenAI()) as url:
        code, data, _ = await bench(repo, "--url", url, "--rate", "40", "--duration", "0.5", "--json")
    assert code == 0
    assert 5 <= json.loads(data)["requests"]["ok"] <= 50


async def test_all_failed_is_exit_code_1_with_the_report(repo: Path) -> None:
    async with serving(FakeOpenAI(faults=dict.fromkeys(range(3), 429))) as url:
        code, text, _ = await bench(repo, "--url", url, "--requests", "3")
    assert code == 1
    assert "http_429 × 3" in text


async def test_ctrl_c_prints_what_was_measured(repo: Path) -> None:
    fake = FakeOpenAI(faults=dict.fromkeys(range(2, 100), "hang"))
    async with serving(fake) as url:
        process = await asyncio.create_subprocess_exec(
            *BENCH, "--url", url, "--concurrency", "2", cwd=repo, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            while len(fake.bodies) < 4:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, _ = await process.communicate()
    assert process.returncode == 130
    assert "2 ok, 0 failed, 2 unfinished" in out.decode()
    assert "interrupted" in out.decode()


async def test_nobody_listening_is_one_line(repo: Path) -> None:
    async with serving(FakeOpenAI()) as url:
        pass
    code, out, err = await bench(repo, "--url", url)
    assert (code, out) == (1, "")
    assert err.strip().splitlines() == [f"Error: nobody listens at {url}: Connection refused"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--rate", "1", "--requests", "3"],
        ["--duration", "3"],
        ["--scenario", "none"],
        ["--prompt-tokens", "9:3"],
        ["--rate", "0"],
        ["--requests", "0"],
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: list[str]) -> None:
    done = CliRunner().invoke(command, ["load", *flags])
    assert done.exit_code == 2
    assert "Error" in done.output
