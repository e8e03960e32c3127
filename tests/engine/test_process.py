"""The engine process as its peer sees it over the raw sockets: garbage, bad submissions, faults, exit codes."""

import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from engine import wire
from engine.config import EngineConfig
from engine.output import Output
from engine.request import FinishReason
from tests.fakes.engine_main import argv
from tests.fakes.sessions import request

pytestmark = pytest.mark.timeout(120)


class Peer:
    """The daemon's side, bare."""

    def __init__(self, directory: Path, config: dict[str, object], **faults: float | str) -> None:
        self._context = zmq.Context()
        self.commands = self._context.socket(zmq.PAIR)
        self.commands.set_hwm(0)
        self.commands.bind(f"ipc://{directory}/c")
        self.process = subprocess.Popen(argv(**faults), stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        boot = wire.Boot(
            config=config,
            commands=f"ipc://{directory}/c",
            telemetry=f"ipc://{directory}/t",  # nobody binds it: telemetry has nowhere to go, and nothing waits for it
            engine_id="test",
            daemon_pid=os.getpid(),
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(boot) + b"\n")
        self.process.stdin.flush()

    def next(self, kind: type[wire.Reply], seconds: float = 60.0) -> wire.Reply:
        """The next reply of that kind; others are passed over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.commands.poll(100):
                reply = wire.decode_reply(self.commands.recv())
                if isinstance(reply, kind):
                    return reply
        raise AssertionError(f"no {kind} within {seconds} s")

    def send(self, command: wire.Command) -> None:
        self.commands.send(wire.encode(command))

    def outputs_until_end(self) -> list[Output]:
        outputs: list[Output] = []
        while not outputs or outputs[-1].finish is None:
            reply = self.next(wire.Outputs)
            assert isinstance(reply, wire.Outputs)
            outputs += reply.outputs
        return outputs

    def sizes(self) -> dict[str, int]:
        self.send(wire.Ask(token=1, part="sizes"))
        answer = self.next(wire.Answer)
        assert isinstance(answer, wire.Answer)
        return dict(answer.value)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.commands.close(linger=0)
        self._context.term()


@contextmanager
def peer(directory: Path, config: dict[str, object] | None = None, **faults: float | str) -> Iterator[Peer]:
    made = Peer(directory, config or EngineConfig(model_dir="none").to_dict(), **faults)
    try:
        yield made
    finally:
        made.close()


def test_garbage_and_mangled_commands_do_not_end_the_engine(tmp_path: Path) -> None:
    generator = random.Random(7)
    good = wire.encode(wire.Submit(requests=[request("mangled")]))
    with peer(tmp_path) as engine:
        engine.next(wire.Ready)
        for _ in range(300):
            engine.commands.send(generator.randbytes(generator.randint(0, 60)))
            bad = bytearray(good)
            bad[generator.randrange(len(bad))] = generator.randrange(256)
            engine.commands.send(bytes(bad[: generator.randint(1, len(bad) - 1)]))
        engine.send(wire.Submit(requests=[request("good", 5)]))
        outputs = engine.outputs_until_end()
        assert sum(len(output.tokens) for output in outputs if output.request_id == "good") == 5
        assert engine.sizes()["bad_commands"] == 600


def test_unknown_ids_parts_and_actions_are_harmless(tmp_path: Path) -> None:
    with peer(tmp_path) as engine:
        engine.next(wire.Ready)
        engine.send(wire.Cancel(request_ids=["nobody"]))
        engine.send(wire.Ack(taken={"nobody": 5}))
        engine.send(wire.Act(token=3, action="fly"))
        answer = engine.next(wire.Answer)
        assert isinstance(answer, wire.Answer)
        assert (answer.token, answer.value) == (3, None)
        assert engine.sizes()["bad_commands"] == 0


def test_a_submission_that_raises_ends_its_choices(tmp_path: Path) -> None:
    with peer(tmp_path) as engine:
        engine.next(wire.Ready)
        engine.send(wire.Submit(requests=[request("twice", 100_000)]))
        engine.next(wire.Outputs)
        engine.send(wire.Submit(requests=[request("new", 5), request("twice", 5)]))
        ends: dict[str, Output] = {}
        while set(ends) != {"new", "twice"}:
            reply = engine.next(wire.Outputs)
            assert isinstance(reply, wire.Outputs)
            ends |= {output.request_id: output for output in reply.outputs if output.finish is not None}
        assert {end.finish for end in ends.values()} == {FinishReason.ERROR}
        assert all(end.facts is not None for end in ends.values())


def test_shutdown_ends_every_choice_and_exits_cleanly(tmp_path: Path) -> None:
    with peer(tmp_path, step_s=0.005) as engine:
        engine.next(wire.Ready)
        engine.send(wire.Submit(requests=[request("a", 100_000), request("b", 100_000)]))
        engine.next(wire.Outputs)
        engine.send(wire.Shutdown())
        ended: set[str] = set()
        while ended != {"a", "b"}:
            reply = engine.next(wire.Outputs)
            assert isinstance(reply, wire.Outputs)
            ended |= {output.request_id for output in reply.outputs if output.finish is FinishReason.ABORT}
        engine.next(wire.Ended)
        assert engine.process.wait(60) == 0


@pytest.mark.parametrize(
    ("fault", "code", "exit_code"),
    [("corrupt", "corrupt_model", 3), ("fit", "does_not_fit", 4), ("bug", "internal_error", 5)],
)
def test_a_fault_while_loading_has_its_code_and_the_process_its_exit_code(
    tmp_path: Path, fault: str, code: str, exit_code: int
) -> None:
    with peer(tmp_path, load_fault=fault) as engine:
        reply = engine.next(wire.Fault)
        assert isinstance(reply, wire.Fault)
        assert (reply.code, reply.exit_code) == (code, exit_code)
        assert "planted" in reply.message
        assert engine.process.wait(60) == exit_code
        assert engine.process.stderr is not None
        assert (b"Traceback" in engine.process.stderr.read()) == (fault == "bug")  # only for what nobody foresaw


def test_an_unknown_setting_is_a_configuration_fault(tmp_path: Path) -> None:
    with peer(tmp_path, config={"model_dir": "none", "color": "red"}) as engine:
        reply = engine.next(wire.Fault)
        assert isinstance(reply, wire.Fault)
        assert (reply.code, reply.exit_code) == ("config_error", 2)
        assert "color" in reply.message


def test_out_of_memory_for_good_is_a_fault_of_that_name(tmp_path: Path) -> None:
    with peer(tmp_path, oom_from_step=1) as engine:
        engine.next(wire.Ready)
        engine.send(wire.Submit(requests=[request(f"r{i}") for i in range(4)]))
        reply = engine.next(wire.Fault)
        assert isinstance(reply, wire.Fault)
        assert (reply.code, reply.exit_code) == ("out_of_memory", 5)
        assert engine.process.wait(60) == 5
