"""The session over real engine processes and real sockets (a fake model): outputs, credit, deaths, drains."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest

from daemon.streams import ENGINE_DIED
from engine.config import EngineConfig
from engine.errors import ConfigError, CorruptModel, DoesNotFit, EngineFault, ModelError
from engine.output import Output
from engine.process import RING
from engine.request import EngineFacts, FinishReason
from telemetry.events import EngineEnded, EngineStarted, EngineStatus, StepReport, decode
from telemetry.recorder import previous, read_ring
from tests.fakes.runner import lone_run
from tests.fakes.sessions import Running, read, request, session

FOREVER = 1_000_000
pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def assert_partition(facts: EngineFacts | None) -> None:
    assert facts is not None
    stages = (facts.queue_ns, facts.prefill_ns, facts.prefill_wait_ns, facts.decode_ns, facts.preempted_ns)
    assert min(stages) >= 0
    assert sum(stages) == facts.emitted_ns - facts.received_ns


def pid_of(running: Running) -> int:
    pid = running.session.view().pid
    assert pid is not None
    return pid


def oom_score(process: str) -> int:
    return int(Path(f"/proc/{process}/oom_score_adj").read_text())


def left_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def gone(pid: int) -> bool:
    """The process has ended (a zombie whose parent has not waited counts)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


async def test_streams_get_every_token_and_one_end_with_facts_that_sum(tmp_path: Path) -> None:
    async with session(tmp_path) as running:
        requests = [request(f"r{i}", max_tokens=20, prompt=(i, 2, 3)) for i in range(8)]
        streams = [running.session.submit([r])[0] for r in requests]
        for r, outputs in zip(requests, await asyncio.gather(*map(read, streams)), strict=True):
            assert tuple(tokens_of(outputs)) == lone_run(r.prompt, r.sampling)
            assert [output.finish for output in outputs if output.finish] == [FinishReason.LENGTH]
            assert_partition(outputs[-1].facts)
        await running.until(lambda: set(running.session.sizes().values()) == {0})


async def test_reports_and_heartbeats_arrive_and_phases_partition_the_step(tmp_path: Path) -> None:
    async with session(tmp_path, step_s=0.01) as running:
        await read(running.session.submit([request("r", max_tokens=10)])[0])
        await running.until(lambda: sum(r.merged for r in running.of(StepReport)) >= 10)
        await running.until(lambda: len(running.of(EngineStatus)) >= 2)
        assert running.session.view().running == 0
        reports = running.of(StepReport)
        assert sum(r.decode_tokens + r.prefill_tokens for r in reports) == 3 + 9
        assert sum(len(r.gaps_us) // 4 for r in reports) == 9
        assert all(r.collect_ns >= 10_000_000 * r.merged for r in reports)
        assert [name for r in reports for name in r.finished] == ["r"]
        statuses = running.of(EngineStatus)
        assert {status.state for status in statuses} == {"ready"}
        assert statuses[-1].rss_bytes > 0


async def test_kill_9_under_8_streams_ends_each_and_it_serves_again_by_itself(tmp_path: Path) -> None:
    async with session(tmp_path, step_s=0.005) as running:
        streams = [running.session.submit([request(f"r{i}", FOREVER)])[0] for i in range(8)]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await running.until(lambda: sum(r.merged for r in running.of(StepReport)) >= 5)
        os.kill(pid_of(running), signal.SIGKILL)
        for outputs in await asyncio.gather(*readers):
            assert outputs[-1].finish is FinishReason.ERROR
            assert outputs[-1].error_code == ENGINE_DIED
            assert_partition(outputs[-1].facts)
        await running.until(lambda: running.session.view().state == "ready")
        assert running.session.view().restarts == 1
        assert len(tokens_of(await read(running.session.submit([request("again", 5)])[0]))) == 5
        (ended,) = running.of(EngineEnded)
        assert ended.cause == "killed"
        assert set(ended.victims) == {f"r{i}" for i in range(8)}
        assert len(running.of(EngineStarted)) == 2


async def test_a_crash_is_told_from_a_kill(tmp_path: Path) -> None:
    async with session(tmp_path, die_at_step=3) as running:
        outputs = await read(running.session.submit([request("r", FOREVER)])[0])
        assert outputs[-1].error_code == ENGINE_DIED
        await running.until(lambda: bool(running.of(EngineEnded)))
        (ended,) = running.of(EngineEnded)
        assert (ended.cause, ended.exit_code) == ("crash", -signal.SIGABRT)


async def test_while_there_is_no_engine_submit_says_why(tmp_path: Path) -> None:
    async with session(tmp_path, wait=False, load_s=30) as running:
        with pytest.raises(EngineFault, match="starting"):
            running.session.submit([request("r")])
        with pytest.raises(EngineFault):
            await running.session.set_limits(None)  # type: ignore[arg-type]
        assert await running.session.ask("sizes") is None


async def test_killed_while_it_loads_it_is_started_again(tmp_path: Path) -> None:  # case 9
    async with session(tmp_path, wait=False, load_s=0.4) as running:
        await running.until(lambda: running.session.engine_pid is not None)
        os.kill(running.session.engine_pid or 0, signal.SIGKILL)
        async with asyncio.timeout(60):
            view = await running.session.wait_ready()
        assert view.restarts == 1


async def test_an_engine_that_never_loads_is_given_up(tmp_path: Path) -> None:
    async with session(tmp_path, wait=False, load_fault="abort") as running:
        async with asyncio.timeout(60):
            with pytest.raises(EngineFault, match="SIGABRT"):
                await running.session.wait_ready()
        assert running.session.view().state == "failed"
        assert len(running.of(EngineEnded)) == 3


@pytest.mark.parametrize(
    ("fault", "error", "exit_code"), [("corrupt", ModelError, CorruptModel.exit_code), ("fit", DoesNotFit, 4)]
)
async def test_what_a_restart_cannot_change_is_raised_at_once_with_its_exit_code(
    tmp_path: Path, fault: str, error: type[Exception], exit_code: int
) -> None:
    async with session(tmp_path, wait=False, load_fault=fault) as running:
        with pytest.raises(error, match="planted") as raised:
            await running.session.wait_ready()
        assert raised.value.exit_code == exit_code  # type: ignore[attr-defined]
        assert len(running.of(EngineEnded)) == 1


async def test_an_engine_that_has_served_is_started_again_whatever_its_successor_lacks(tmp_path: Path) -> None:
    async with session(tmp_path, load_fault_once=str(tmp_path / "starts")) as running:
        os.kill(pid_of(running), signal.SIGKILL)
        await running.until(lambda: running.session.view().restarts == 2 and running.session.view().state == "ready")
        assert [ended.exit_code for ended in running.of(EngineEnded)] == [-signal.SIGKILL, DoesNotFit.exit_code]


async def test_a_command_that_does_not_exist_is_a_clear_fault(tmp_path: Path) -> None:
    async with session(tmp_path, wait=False, argv=["/nonexistent/engine"]) as running:
        with pytest.raises(EngineFault, match="could not be started"):
            await running.session.wait_ready()


async def test_cancel_ends_the_choice_and_the_others_go_on(tmp_path: Path) -> None:
    async with session(tmp_path, step_s=0.005) as running:
        left, stays = (running.session.submit([request(name, FOREVER)])[0] for name in ("left", "stays"))
        await anext(left)
        left.cancel()
        outputs = await read(left)
        assert outputs[-1].finish is FinishReason.ABORT
        assert_partition(outputs[-1].facts)
        assert (await anext(stays)).finish is None
        stays.cancel("stop")
        assert (await read(stays))[-1].finish is FinishReason.STOP
        await running.until(lambda: running.session.view().running == 0)
        sizes = await running.session.ask("sizes")
        assert sizes is not None
        assert not [name for name, size in sizes.items() if size and name.startswith("loop_")]


async def test_a_stream_that_nobody_reads_stops_at_its_credit_while_others_go_on(tmp_path: Path) -> None:
    config = EngineConfig(model_dir="none", output_credit=16)
    async with session(tmp_path, config=config) as running:
        silent = running.session.submit([request("silent", FOREVER)])[0]
        assert len(tokens_of(await read(running.session.submit([request("reader", 300)])[0]))) == 300
        first = await anext(silent)
        assert len(first.tokens) == 16
        assert len((await anext(silent)).tokens) <= 16  # reading gave it credit again
        silent.cancel()


async def test_when_all_wait_for_their_readers_the_engine_sleeps(tmp_path: Path) -> None:
    config = EngineConfig(model_dir="none", output_credit=4)
    async with session(tmp_path, config=config) as running:
        silent = running.session.submit([request("silent", FOREVER)])[0]
        await running.until(lambda: len(running.of(EngineStatus)) >= 3)
        before, after = running.of(EngineStatus)[-2:]
        assert after.cpu_ns - before.cpu_ns < 0.2 * (after.at_ns - before.at_ns)
        assert after.running == 1
        silent.cancel()


async def test_limits_are_replaced_while_it_serves(tmp_path: Path) -> None:
    async with session(tmp_path, step_s=0.002) as running:
        limits = running.session.view().limits
        assert limits is not None
        streams = [running.session.submit([request(f"r{i}", 50)])[0] for i in range(6)]
        lower = limits.replaced({"max_num_seqs": 2})
        assert await running.session.set_limits(lower) == lower
        assert running.session.view().limits == lower
        with pytest.raises(ConfigError, match="max_num_seqs"):
            await running.session.set_limits(limits.replaced({"max_num_seqs": 10_000}))
        assert running.session.view().limits == lower
        for outputs in await asyncio.gather(*map(read, streams)):
            assert len(tokens_of(outputs)) == 50


async def test_drain_finishes_what_runs(tmp_path: Path) -> None:
    async with session(tmp_path, step_s=0.005) as running:
        reader = asyncio.create_task(read(running.session.submit([request("r", 30)])[0]))
        await running.until(lambda: bool(running.of(StepReport)))
        pid = pid_of(running)
        await running.session.drain(10)
        assert (await reader)[-1].finish is FinishReason.LENGTH
        assert gone(pid)
        assert running.session.view().state == "stopped"
        assert [ended.cause for ended in running.of(EngineEnded)] == ["drained"]
        assert left_in(tmp_path) == []


async def test_a_drain_past_its_grace_aborts_the_rest(tmp_path: Path) -> None:
    async with session(tmp_path, step_s=0.005) as running:
        reader = asyncio.create_task(read(running.session.submit([request("r", FOREVER)])[0]))
        await running.until(lambda: bool(running.of(StepReport)))
        begun = time.monotonic()
        await running.session.drain(0.3)
        assert 0.25 < time.monotonic() - begun < 60
        assert (await reader)[-1].finish is FinishReason.ABORT


async def test_while_draining_new_requests_are_refused(tmp_path: Path) -> None:
    async with session(tmp_path, step_s=0.005) as running:
        reader = asyncio.create_task(read(running.session.submit([request("r", 40)])[0]))
        drain = asyncio.create_task(running.session.drain(10))
        await running.until(lambda: running.session.view().state == "draining")
        with pytest.raises(EngineFault, match="draining"):
            running.session.submit([request("late")])
        await asyncio.gather(reader, drain)


@pytest.mark.parametrize("fault", [{"hang_at_step": 2}, {"close_s": 60.0}])
async def test_an_engine_that_does_not_stop_is_killed(tmp_path: Path, fault: dict[str, float]) -> None:  # case 9
    async with session(tmp_path, **fault) as running:
        stream = running.session.submit([request("r", 2)])[0]
        pid = pid_of(running)
        begun = time.monotonic()
        await running.session.drain(0.2)
        assert time.monotonic() - begun < 50
        assert gone(pid)
        assert (await read(stream))[-1].finish is not None


async def test_killed_while_it_stops_the_drain_still_ends(tmp_path: Path) -> None:  # case 9
    async with session(tmp_path, close_s=60.0) as running:
        drain = asyncio.create_task(running.session.drain(30))
        await running.until(lambda: running.session.view().state == "draining")
        os.kill(pid_of(running), signal.SIGKILL)
        await asyncio.wait_for(drain, 20)
        assert running.session.view().state == "stopped"


async def test_drain_while_it_loads_ends_at_once(tmp_path: Path) -> None:
    async with session(tmp_path, wait=False, load_s=60) as running:
        await running.until(lambda: running.session.engine_pid is not None)
        pid = running.session.engine_pid or 0
        await asyncio.wait_for(running.session.drain(30), 20)
        assert gone(pid)


async def test_a_signal_to_the_whole_group_does_not_end_the_engine(tmp_path: Path) -> None:
    async with session(tmp_path) as running:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid_of(running), number)
        assert len(tokens_of(await read(running.session.submit([request("r", 5)])[0]))) == 5
        assert running.session.view().restarts == 0


async def test_the_kernel_would_kill_the_engine_before_the_daemon(tmp_path: Path) -> None:
    async with session(tmp_path) as running:
        own, engine = oom_score("self"), oom_score(str(pid_of(running)))
        assert engine > own or own == 1000


async def test_a_killed_engine_leaves_its_last_steps_in_the_ring(tmp_path: Path) -> None:
    config = EngineConfig(model_dir="none", state_dir=str(tmp_path / "state"))
    async with session(tmp_path / "run", config=config, step_s=0.002) as running:
        stream = running.session.submit([request("r", FOREVER)])[0]
        await running.until(lambda: sum(r.merged for r in running.of(StepReport)) >= 20)
        os.kill(pid_of(running), signal.SIGKILL)
        await read(stream)
        await running.until(lambda: running.session.view().state == "ready")
    before = read_ring(previous(tmp_path / "state" / RING))
    assert not before.clean
    steps = [event.step for event in map(decode, (payload for _, payload in before.records)) if hasattr(event, "step")]
    assert len(steps) >= 20
    assert steps == sorted(steps)
    assert read_ring(tmp_path / "state" / RING).clean  # the one after it was drained


async def test_a_long_runtime_directory_does_not_stop_it(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    async with session(deep) as running:
        assert len(tokens_of(await read(running.session.submit([request("r", 3)])[0]))) == 3


async def test_readers_that_come_and_leave_at_random_leave_nothing_behind(tmp_path: Path) -> None:  # case 7, 30
    generator = random.Random(3)

    async def visitor(running: Running, number: int) -> None:
        for visit in range(8):
            name, prompt = f"{number}-{visit}", [generator.randrange(50) for _ in range(generator.randint(1, 80))]
            group = [request(f"{name}-{i}", 40, prompt, group_id=name, index=i) for i in range(generator.randint(1, 3))]
            for stream in running.session.submit(group):
                for _ in range(generator.randrange(6)):
                    if (await anext(stream)).finish is not None:
                        break
                stream.cancel(generator.choice(["abort", "stop"]))  # at any moment, also after the end

    async with session(tmp_path, step_s=0.001, kv_blocks=96, rows=16) as running:
        await asyncio.gather(*(visitor(running, number) for number in range(32)))
        await running.until(lambda: not running.session.sizes()["session_streams"])
        await running.until(lambda: not any(running.session.sizes().values()))
        seen = len(running.of(EngineStatus))
        await running.until(lambda: len(running.of(EngineStatus)) > seen + 1)
        last = running.of(EngineStatus)[-1]
        assert (last.running, last.waiting, last.kv_active) == (0, 0, 0)
        assert last.kv_cached + last.kv_free == 96
        kept = ("prefixes", "pool_", "outbox")  # what the cache keeps, at most a pool; and this heartbeat itself
        left = {name: size for name, size in last.sizes.items() if size and not name.startswith(kept)}
        assert left == {}
        assert running.session.view().restarts == 0
