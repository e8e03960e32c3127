"""The load generator against inferd's own API: what it sends is accepted, what comes back is counted right."""

from daemon.load.client import connect
from daemon.load.drive import Drive
from daemon.load.scenarios import Lengths, scenario
from daemon.load.workload import Workload
from tests.fakes.api import serving
from tests.fakes.port import ScriptedPort, saying

SHARES = scenario("short", Lengths(200, 300), Lengths(11, 11))


async def test_a_closed_loop_gets_every_token_counted_by_usage() -> None:
    async with (
        ScriptedPort(saying("hello world")) as port,
        serving(port) as api,
        connect(api.url, connections=4) as client,
    ):
        drive = Drive(Workload(SHARES, 1, await client.prepare()), client.ask)
        await drive.closed(4, 12)
        await api.settled(12)
    assert client.model == "tiny"
    assert drive.workload.sizer.source == "tokenize"
    assert [(s.error, s.output_tokens, s.counted) for s in drive.samples] == [("", 11, True)] * 12
    assert all(abs(s.prompt_tokens - s.prompt_tokens_aimed) < 60 for s in drive.samples)
    assert sorted(r.prompt_tokens for r in api.records) == sorted(s.prompt_tokens for s in drive.samples)


async def test_being_shed_is_an_error_of_its_own_kind() -> None:
    async with (
        ScriptedPort(saying("hello world"), rows=1, step_s=0.02) as port,
        serving(port, max_requests=0) as api,
        connect(api.url) as client,
    ):
        drive = Drive(Workload(SHARES, 1, await client.prepare()), client.ask)
        await drive.closed(6, 6)
    errors = [s.error for s in drive.samples if s.error]
    assert errors
    assert set(errors) == {"http_429"}
    assert len(errors) < 6
