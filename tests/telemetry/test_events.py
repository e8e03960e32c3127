"""Every event of the vocabulary survives a round trip and has a place to go."""

import typing
from typing import Any

import msgspec
import pytest

from telemetry import events
from telemetry.evidence import Clue, FailedStep, Knob, MemoryFault, ProcessEnd, Reading
from telemetry.feed import from_sse, to_sse
from telemetry.fold import Fold

ALL: list[type[events.Event]] = list(typing.get_args(events.AnyEvent))

# A value of each type that a field may have; a new kind of field needs a line here.
VALUES: dict[Any, Any] = {
    int: 7,
    str: "text",
    bool: True,
    float: 0.5,
    bytes: b"\x01\x00\x00\x00",
    dict[str, int]: {"prefill": 3},
    dict[str, float]: {"p95": 0.25},
    dict[str, bytes]: {"lifetime": b"\x01\x00\x00\x00"},
    dict[str, str]: {"seen": "x"},
    dict[str, Any]: {"device": "cpu", "rows": 4},
    tuple[int, ...]: (1, 2),
    tuple[str, ...]: ("a", "b"),
    tuple[tuple[int, str], ...]: ((0, "r"),),
    tuple[tuple[str, int, int], ...]: (("prefill", 9, 16),),
    tuple[events.Preempted, ...]: (events.Preempted("r", 5, "kv"),),
    events.LimitsView: events.LimitsView(
        max_num_seqs=1,
        max_num_batched_tokens=2,
        prefill_chunk=3,
        max_partial_prefills=4,
        context_limit=5,
        kv_blocks=6,
        spec_depth=0,
    ),
    tuple[events.RequestView, ...]: (events.RequestView(request_id="r", state="running"),),
    tuple[Clue, ...]: (Clue("leak", "against", "nothing grew"),),
    tuple[Knob, ...]: (Knob("--max-num-seqs", "lower it"),),
    MemoryFault | None: MemoryFault(requested_bytes=9, step=FailedStep(step=3), at=Reading(free_bytes=4)),
    ProcessEnd | None: ProcessEnd(process="engine", exit_code=-9, last_lines=("so long",)),
}


def example(kind: type[events.Event]) -> events.Event:
    return kind(**{field.name: VALUES[field.type] for field in msgspec.structs.fields(kind)})


def test_the_union_holds_every_event_there_is() -> None:
    assert set(ALL) == set(events.Event.__subclasses__())


@pytest.mark.parametrize("kind", ALL)
def test_round_trips(kind: type[events.Event]) -> None:
    event = example(kind)
    assert events.decode(events.encode(event)) == event
    name, data, *_ = to_sse(event).decode().split("\n")
    assert name == f"event: {kind.__name__}"
    assert from_sse(data.removeprefix("data: ")) == event


def test_every_event_is_folded() -> None:
    fold = Fold("m")
    assert fold.handles == set(ALL)
    fold.take([example(kind) for kind in ALL])
    with fold.reading() as state:
        assert state.unfolded == 0


def test_rubbish_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        events.decode(b"\xff\x00rubbish")
