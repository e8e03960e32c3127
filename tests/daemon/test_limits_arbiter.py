"""The arbiter is the one writer of the limits: it checks, applies, announces, and remembers over a restart."""

import os
import signal
from pathlib import Path

import pytest

from daemon.limits import LimitsArbiter
from engine.errors import ConfigError, EngineFault
from telemetry.events import LimitsChanged
from tests.fakes.sessions import session

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


async def test_a_proposal_is_applied_and_announced(tmp_path: Path) -> None:
    async with session(tmp_path) as running:
        arbiter = LimitsArbiter(running.session, running.events.append)
        limits = await arbiter.propose({"max_num_seqs": 3, "prefill_chunk": 64}, "api", "a test")
        assert (limits.max_num_seqs, limits.prefill_chunk) == (3, 64)
        assert running.session.view().limits == limits
        (changed,) = running.of(LimitsChanged)
        assert (changed.limits.max_num_seqs, changed.source, changed.why) == (3, "api", "a test")


@pytest.mark.parametrize(
    ("changes", "named"), [({"max_num_seqs": 0}, "max_num_seqs"), ({"kv_blocks": 10**9}, "kv_blocks"), ({"x": 1}, "x")]
)
async def test_a_bad_proposal_changes_nothing_and_names_the_limit(
    tmp_path: Path, changes: dict[str, int], named: str
) -> None:
    async with session(tmp_path) as running:
        arbiter = LimitsArbiter(running.session, running.events.append)
        before = running.session.view().limits
        with pytest.raises(ConfigError, match=named):
            await arbiter.propose(changes, "api", "")
        assert running.session.view().limits == before
        assert arbiter.changes == {}
        assert running.of(LimitsChanged) == []


async def test_what_was_changed_holds_for_the_next_engine_as_far_as_its_ceilings_allow(tmp_path: Path) -> None:
    async with session(tmp_path) as running:
        arbiter = LimitsArbiter(running.session, running.events.append)
        running.session.on_limits(arbiter.restored)
        wanted = await arbiter.propose({"max_num_seqs": 3}, "tuner", "")
        first = running.session.view()
        assert first.pid is not None
        assert first.resolved is not None
        os.kill(first.pid, signal.SIGKILL)
        await running.until(lambda: running.session.view().restarts == 1 and running.session.view().state == "ready")
        assert running.session.view().limits == wanted
        assert [event.source for event in running.of(LimitsChanged)] == ["tuner", "start"]
        # A proposal that goes on from there keeps it, which it would not if the engine had not been told.
        assert (await arbiter.propose({"prefill_chunk": 8}, "api", "")).max_num_seqs == 3


async def test_without_an_engine_a_proposal_is_refused(tmp_path: Path) -> None:
    async with session(tmp_path, wait=False, load_s=30) as running:
        arbiter = LimitsArbiter(running.session, running.events.append)
        with pytest.raises(EngineFault):
            await arbiter.propose({"max_num_seqs": 3}, "api", "")
