"""Remedies: what a runbook tells a person to do, as one command each, over the control socket.

Owns the names of the actions and what each asks of the daemon. It must not decide whether one is wise. Enter at `act`.
"""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from engine.errors import ConfigError, InferdError
from telemetry.client import Client

_BASE: Final = "/inferd/v1"


def act(client: Client, action: str, words: Sequence[str]) -> str:
    """Do it; what was done, in a line. Raises ConfigError for a wrong word, ClientError if the daemon refuses."""
    if action not in ACTIONS:
        raise ConfigError(f"there is no action {action!r}", f"there are: {', '.join(ACTIONS)}")
    return ACTIONS[action](client, words)


def _set(client: Client, words: Sequence[str]) -> str:
    """NAME=VALUE…: replace live limits."""
    changes = {}
    for word in words:
        name, _, value = word.partition("=")
        if not value.isdigit():
            raise ConfigError(f"{word!r} is not NAME=VALUE", "e.g. max_num_seqs=8")
        changes[name] = int(value)
    if not changes:
        raise ConfigError("set needs at least one NAME=VALUE", "e.g. max_num_seqs=8")
    answer = client.post(f"{_BASE}/tuner", {"set": changes, "why": "inferd doctor do set"})
    return "limits: " + ", ".join(f"{name} {value}" for name, value in answer["limits"].items())


def _abort(client: Client, words: Sequence[str]) -> str:
    """ID: end a running request."""
    if len(words) != 1:
        raise ConfigError("abort needs the id of one request", "its X-Request-Id, or the id of the answer")
    return f"aborted {client.post(f'{_BASE}/abort/{words[0]}')['aborted_choices']} choices"


def _restart_engine(client: Client, words: Sequence[str]) -> str:
    """Kill the engine's process: its daemon starts a new one. A wedged engine would not listen to less."""
    state = client.snapshot(["state"]).state
    if state is None or state.engine_pid is None:
        raise InferdError("there is no engine to restart", "the daemon starts one by itself: inferd doctor")
    if client.endpoint.socket is None:
        raise ConfigError("restart-engine works on the daemon's own machine only", "log in there")
    try:
        os.kill(state.engine_pid, signal.SIGKILL)
    except OSError as error:
        raise InferdError(f"cannot end process {state.engine_pid}: {error.strerror}") from error
    return f"engine process {state.engine_pid} was killed; the daemon starts a new one"


def _posting(path: str, said: str) -> Callable[[Client, Sequence[str]], str]:
    def post(client: Client, words: Sequence[str]) -> str:
        client.post(f"{_BASE}/{path}")
        return said

    return post


ACTIONS: Final[Mapping[str, Callable[[Client, Sequence[str]], str]]] = {
    "set": _set,
    "abort": _abort,
    "drain": _posting("drain", "draining: no new requests; `inferd doctor do resume` lets them in again"),
    "resume": _posting("resume", "requests are let in"),
    "reset-cache": _posting("cache/reset", "the prefix cache is empty"),
    "restart-engine": _restart_engine,
}
