"""The tuner's decisions and state for people: where they are read, and how they are written.

Enter at `known`, `client` and `status_text`.
"""

import time
from typing import Any, Final

import msgspec

from daemon.paths import state_dir
from engine.errors import ConfigError, InferdError
from telemetry import journal
from telemetry.client import Client, ClientError, find
from telemetry.events import Decision

ROUTE: Final = "/inferd/v1/tuner"


class _Asked(Client):
    """A client whose failures are errors of the command line."""

    def _exchange(self, method: str, path: str, body: bytes | None) -> bytes:
        try:
            return super()._exchange(method, path, body)
        except ClientError as error:
            raise InferdError(error.message, error.hint) from None


def client(socket: str, url: str, key: str) -> Client:
    """The daemon that runs. Raises ConfigError if there is none."""
    try:
        return _Asked(find(socket, url, key))
    except ClientError as error:
        raise ConfigError(error.message, error.hint) from None


def known(socket: str, url: str, key: str) -> list[tuple[float, Decision]]:
    """Decisions with the wall clock's time of each, oldest first, every one with its verdict if it has one."""
    try:
        asked = Client(find(socket, url, key)).snapshot(["decisions"])
    except ClientError as error:
        if socket or url:
            raise ConfigError(error.message, error.hint) from None
        return _kept()
    offset = asked.unix_seconds - asked.at_ns / 1e9
    return [(offset + one.at_ns / 1e9, one) for one in asked.decisions or ()]


def _kept() -> list[tuple[float, Decision]]:
    """Of the journal; a verdict takes the place of the decision it is about, at the time that this was made."""
    found: dict[object, tuple[float, Decision]] = {}
    for line in journal.read(state_dir() / "journal.jsonl"):
        if isinstance(line.event, Decision):
            name: object = line.event.number or line.unix_seconds
            made, _ = found.get(name, (line.unix_seconds, None))
            found[name] = (made, line.event)
    return list(found.values())


def as_json(when: float, decision: Decision) -> str:
    return (msgspec.json.encode({"unix_seconds": when, **msgspec.to_builtins(decision)})).decode()


def as_text(when: float, decision: Decision) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    others = "".join(f", {name} → {value}" for name, value in decision.also.items())
    lines = [
        f"{stamp}  {decision.rule} ({decision.direction}): {decision.knob} {decision.before} → {decision.after}{others}"
    ]
    lines.append(f"    {decision.why}")
    figures_of = {"saw": decision.evidence, "expected": decision.predicted, "measured": decision.measured}
    for title, figures in figures_of.items():
        if figures:
            lines.append(f"    {title} " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    lines.append(f"    {decision.verdict or 'being tried'}")
    return "\n".join(lines)


def status_text(status: dict[str, Any]) -> str:
    lines = [f"The tuner is {status['state']}" + (f": {status['why']}" if status.get("why") else "")]
    trying = status.get("trying")
    if trying:
        lines.append(f"  trying {trying['changes']}, by {trying['rule']}: {trying['why']}")
    for name, error in (status.get("disabled") or {}).items():
        lines.append(f"  the rule {name} failed and is disabled: {error}")
    for name, why in (status.get("unmet") or {}).items():
        lines.append(f"  target {name} is missed: {why}")
    if status.get("memory"):
        lines.append(f"  memory: {status['memory']}")
    pinned = status.get("pinned") or ()
    for name, limit in (status.get("limits") or {}).items():
        reason = f"{limit['source']}: {limit['why']}" if limit.get("why") else "as resolved"
        held = " (pinned)" if name in pinned else ""
        lines.append(f"  {name:<23}{limit['value']!s:>7}  of {limit['least']}–{limit['most']}{held}  {reason}")
    return "\n".join(lines)
