"""SIGHUP: the settings are read again; limits go through the arbiter, what cannot change live is named in the log."""

import logging
import os
import signal
from pathlib import Path

import pytest

from daemon.limits import LimitsArbiter
from daemon.reload import Reload
from daemon.settings import Loaded, load
from telemetry.events import LimitsChanged
from tests.fakes.sessions import session
from tests.fakes.tiny import prepare_tiny, write_tiny
from tests.served import Served, wait_for


@pytest.mark.timeout(120)
async def test_what_may_change_live_is_proposed_and_the_rest_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "inferd.toml"

    def read() -> Loaded:
        return load({}, environ={}, config=str(file))

    file.write_text("max_num_seqs = 4\n")
    caplog.set_level(logging.INFO)
    async with session(tmp_path) as running:
        arbiter = LimitsArbiter(running.session, running.events.append)
        reload = Reload(read(), read, running.session.view, arbiter.propose)
        first = running.session.view()
        assert first.limits is not None
        assert first.resolved is not None

        async def after(text: str) -> str:
            """The log of one reload with this file."""
            caplog.clear()
            file.write_text(text)
            await reload.again()
            return caplog.text

        assert "no setting has changed" in await after("max_num_seqs = 4\n")
        assert "max_num_seqs=3" in await after("max_num_seqs = 3\n")
        (changed,) = running.of(LimitsChanged)
        assert (changed.limits.max_num_seqs, changed.source) == (3, "config")
        assert "device, port cannot change while serving" in await after("max_num_seqs = 3\nport = 1\ndevice = 'cpu'\n")
        assert "nothing was changed" in await after("max_num_seqs = 100000\n")
        assert "nothing was changed" in await after("max_num_seq = 2\n")
        assert "nothing was changed" in await after("max_num_seqs = [\n")
        assert arbiter.changes == {"max_num_seqs": 3}
        await after("")
        limits = running.session.view().limits
        assert limits is not None
        assert limits.max_num_seqs == first.resolved.rows, "a setting that is gone is its ceiling"


@pytest.mark.timeout(120)
def test_a_daemon_reads_its_file_again(tmp_path: Path) -> None:
    model = tmp_path / "model"
    prepare_tiny(model, write_tiny("llama", model))
    file = tmp_path / "inferd.toml"
    file.write_text("max_num_seqs = 8\n")
    with Served(tmp_path / "served", str(model), "--config", str(file)) as served:
        file.write_text("max_num_seqs = 2\nmax_body = '1MiB'\n")
        os.kill(served.pid, signal.SIGHUP)
        wait_for(lambda: served.snapshot("limits")["limits"]["max_num_seqs"] == 2, 60, "the new limit")
        wait_for(lambda: "max_body cannot change while serving" in served.log, 60, "the rest is named")
