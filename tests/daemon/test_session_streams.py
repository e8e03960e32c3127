"""Streams: merging while nobody reads, waking once, credit, and the end that an engine's death gives."""

import asyncio

import pytest

from daemon.streams import StreamTable
from engine.output import Output
from engine.request import EngineFacts, FinishReason, TokenLogprob
from telemetry.events import StepReport

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


class Table(StreamTable):
    """A table that notes what its streams say."""

    def __init__(self) -> None:
        self.acks: list[tuple[str, int]] = []
        self.cancels: list[tuple[str, str]] = []
        super().__init__(
            lambda request_id, tokens: self.acks.append((request_id, tokens)),
            lambda stream, reason: self.cancels.append((stream.request_id, reason)),
        )


def out(*tokens: int, finish: FinishReason | None = None, at_ns: int = 1) -> Output:
    return Output(request_id="r", tokens=tokens, finish=finish, at_ns=at_ns)


async def test_outputs_are_merged_in_order_while_nobody_reads() -> None:
    table = Table()
    stream = table.open("r", 0)
    entry = TokenLogprob(7, -0.5, 1)
    for output in (out(1, 2), Output(request_id="r", tokens=(3,), logprobs=(entry,), at_ns=5), out(4, at_ns=9)):
        table.deliver([output])
    merged = await anext(stream)
    assert (merged.tokens, merged.logprobs, merged.at_ns) == ((1, 2, 3, 4), (entry,), 9)
    assert table.acks == [("r", 4)]


async def test_a_waiting_reader_is_woken_once_for_a_batch() -> None:
    table = Table()
    stream = table.open("r", 0)
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    table.deliver([out(1), out(2)])
    assert (await reader).tokens == (1, 2)


async def test_the_last_output_ends_the_iteration_and_leaves_the_map() -> None:
    table = Table()
    stream = table.open("r", 0)
    table.deliver([out(1, finish=FinishReason.STOP)])
    assert len(table) == 0
    assert [output.finish async for output in stream] == [FinishReason.STOP]
    stream.cancel()
    assert table.cancels == []
    table.deliver([out(2)])  # nobody's any more


async def test_a_cancelled_reader_loses_nothing() -> None:
    table = Table()
    stream = table.open("r", 0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    table.deliver([out(1)])
    assert (await anext(stream)).tokens == (1,)
    stream.cancel("stop")
    assert table.cancels == [("r", "stop")]


async def test_an_id_in_use_is_refused() -> None:
    table = Table()
    table.open("r", 0)
    with pytest.raises(ValueError, match="in use"):
        table.open("r", 0)


@pytest.mark.parametrize("admitted_ns", [0, 5, 150])
@pytest.mark.parametrize("tokens_ns", [(), (200,), (200, 300)])
async def test_at_the_engines_death_the_known_stages_sum(admitted_ns: int, tokens_ns: tuple[int, ...]) -> None:
    table = Table()
    stream = table.open("r", 100)
    if admitted_ns:
        table.admitted(StepReport(at_ns=admitted_ns, step=1, admitted=((0, "r"), (1, "other"))))
    for at_ns in tokens_ns:
        table.deliver([out(1, at_ns=at_ns)])
    assert table.end_all("it died", 1000) == ("r",)
    last = [output async for output in stream][-1]
    assert (last.finish, last.error_code, last.error) == (FinishReason.ERROR, "engine_died", "it died")
    facts = last.facts
    assert isinstance(facts, EngineFacts)
    stages = (facts.queue_ns, facts.prefill_ns, facts.decode_ns)
    assert sum(stages) == facts.emitted_ns - facts.received_ns == 900
    assert min(stages) >= 0
    assert bool(facts.decode_ns) == bool(tokens_ns)
    assert facts.first_token_ns == (tokens_ns[0] if tokens_ns else 0)
