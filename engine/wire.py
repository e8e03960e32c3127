"""What the daemon and the engine process say to each other: tagged msgpack messages over two ZeroMQ sockets.

* `commands` (PAIR, unlimited high-water marks, lossless both ways): Command daemon → engine, Reply engine → daemon.
* `telemetry` (PUSH → PULL, bounded, lossy): a list of `telemetry.events` per frame; what is dropped is counted.

It owns the message types and their framing, not the sockets. No torch. Flow control: the engine grants a request no
more than `EngineConfig.output_credit` tokens that were not acknowledged by `Ack`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.budget import Limits, Resolved
from engine.output import Output
from engine.request import Request
from telemetry.events import AnyEvent, Event


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """The one line of JSON on the engine's standard input. The pipe then stays open: its end is the daemon's end."""

    config: dict[str, Any]  # engine.config.EngineConfig
    commands: str  # ZeroMQ endpoints, bound by the daemon
    telemetry: str
    engine_id: str
    daemon_pid: int
    pulse_fd: int = -1  # inherited: engine/pulse.py; -1 = none
    stacks_fd: int = -1  # inherited: where SIGUSR1 has the stacks of all threads written; -1 = nowhere


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """New choices. Choices of one group come together, so that the engine can share their prompt's blocks."""

    requests: list[Request]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop these choices; each still gets its last Output (finish=`reason`, with facts). Unknown ids are ignored.

    `reason` is an engine.request.FinishReason value: 'abort' for a client that left, 'stop' when the daemon found a
    stop string.
    """

    request_ids: list[str]
    reason: str = "abort"


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """The reader of each choice has taken so many more tokens."""

    taken: dict[str, int]


class SetLimits(msgspec.Struct, frozen=True, tag="set_limits"):
    """Replace the limits between two steps; answered by LimitsSet."""

    limits: Limits


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Ask for a part of the engine's state ('requests', 'blocks', 'memory', 'sizes'); answered by Answer."""

    token: int
    part: str


class Act(msgspec.Struct, frozen=True, tag="act"):
    """Do something out of line ('reset_cache'); answered by Answer."""

    token: int
    action: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what runs and waits, then end. New submissions are a protocol error: the daemon refuses them."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End now: every live choice gets its last Output with finish=abort."""


Command = Submit | Cancel | Ack | SetLimits | Ask | Act | Drain | Shutdown


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and profiled. `phases` are the stages of start-up in ns."""

    pid: int
    resolved: Resolved
    limits: Limits
    phases: dict[str, int]


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """One step's new tokens and ends."""

    outputs: list[Output]


class LimitsSet(msgspec.Struct, frozen=True, tag="limits_set"):
    """The limits now in force; `refused` says why, if they are not the ones asked for."""

    limits: Limits
    refused: str = ""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """`value` is plain data (dicts, lists, numbers, bytes)."""

    token: int
    value: Any


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """The engine cannot go on (or could not start): `code` and `hint` are those of engine.errors."""

    code: str
    message: str
    hint: str = ""
    exit_code: int = 5


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Last word of an orderly end."""


Reply = Ready | Outputs | LimitsSet | Answer | Fault | Ended

_encoder = msgspec.msgpack.Encoder()
_events = msgspec.msgpack.Decoder(list[AnyEvent])
_commands = msgspec.msgpack.Decoder(Command)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Command | Reply) -> bytes:
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    """Raises msgspec.DecodeError for anything that is no command."""
    return _commands.decode(frame)


def decode_reply(frame: bytes) -> Reply:
    """Raises msgspec.DecodeError for anything that is no reply."""
    return _replies.decode(frame)


def encode_events(events: list[Event]) -> bytes:
    """One frame of the telemetry socket."""
    return _encoder.encode(events)


def decode_events(frame: bytes) -> Sequence[Event]:
    """Raises msgspec.DecodeError for anything that is no list of events."""
    return _events.decode(frame)
