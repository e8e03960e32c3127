"""Settings: what the operator asked of the daemon, each value with where it came from.

defaults < configuration file < profile < INFERD_* environment < flags. Owns names, types, defaults and help of every
setting; the commands make their flags from it. It must not act on any of them. Enter at `load`. Unknown names fail with
the nearest one: a misspelt limit that is silently ignored is found at 3 a.m.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from engine.config import DEVICES, DTYPES
from engine.errors import ConfigError

PREFIX: Final = "INFERD_"
# Other variables of ours that are no settings.
_OTHER_VARIABLES: Final = ("INFERD_CONFIG", "INFERD_SOCKET", "INFERD_URL")
_UNITS: Final = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_BYTES: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def byte_size(value: Any) -> int:
    """1200MiB, 1.5 GB, 4096. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a size such as 1200MiB, 2GiB or a number of bytes")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected a non-empty string")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value.strip()):
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("expected a whole number")
    return value


def _number(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError("expected a number") from None
    if not 0 <= number < 1e9:
        raise ValueError("expected a number of 0 or more")
    return number


def _share(value: Any) -> float:
    number = _number(value)
    if number > 1:
        raise ValueError("expected a share from 0 to 1")
    return number


def _truth(value: Any) -> bool:
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    found = value if isinstance(value, bool) else known.get(str(value).lower())
    if found is None:
        raise ValueError("expected true or false")
    return bool(found)


def _names(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ValueError("expected strings")
    return tuple(part.strip() for part in parts if part.strip())


def _one_of(*known: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in known:
            raise ValueError(f"expected one of {', '.join(known)}")
        return str(value)

    return parse


def _at_least(least: int, parse: Callable[[Any], int] = _whole, most: int = 2**62) -> Callable[[Any], int]:
    def checked(value: Any) -> int:
        number = parse(value)
        if not least <= number <= most:
            raise ValueError(f"expected {least} or more" if most == 2**62 else f"expected {least} to {most}")
        return number

    return checked


def _setting(default: Any, parse: Callable[[Any], Any], help_text: str, *, secret: bool = False) -> Any:
    return field(default=default, metadata={"parse": parse, "help": help_text, "secret": secret})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting. None means: let the machine decide, or: off."""

    model: str = _setting("smollm2", _text, "What to serve: a name of the library, a .gguf file or a model directory.")
    served_model_name: tuple[str, ...] = _setting((), _names, "Name for clients; repeat it for aliases.")
    host: str = _setting("127.0.0.1", _text, "Address of the API; anything but loopback needs a key.")
    port: int = _setting(8000, _at_least(0, most=65535), "Port of the API; 0 takes a free one.")
    device: str = _setting("auto", _one_of(*DEVICES), "Where the model runs.")
    dtype: str = _setting("auto", _one_of(*DTYPES), "Type of weights and activations.")
    max_model_len: int | None = _setting(None, _at_least(1), "Ceiling of a request's context, in tokens.")
    max_num_seqs: int | None = _setting(None, _at_least(1), "Most sequences that run at once.")
    max_num_batched_tokens: int | None = _setting(None, _at_least(1), "Most tokens computed in one step.")
    memory_limit: int | None = _setting(None, _at_least(1, byte_size), "Most memory for all of inferd, e.g. 1200MiB.")
    threads: int | None = _setting(None, _at_least(1), "Compute threads on a CPU.")
    block_size: int = _setting(16, _at_least(1, most=1024), "Tokens of a KV block; a power of two.")
    prefix_cache: bool = _setting(True, _truth, "Reuse the computed start of a prompt.")
    api_key_file: str | None = _setting(None, _text, "File with API keys, one a line.")
    api_key: str | None = _setting(None, _text, "One API key; meant for the environment.", secret=True)
    admin_host: str = _setting("127.0.0.1", _text, "Address of the admin port.")
    admin_port: int | None = _setting(None, _at_least(0, most=65535), "Second port: health, metrics, control.")
    admin_key_file: str | None = _setting(None, _text, "File with admin keys: without, no control on the admin port.")
    admin_key: str | None = _setting(None, _text, "One admin key; meant for the environment.", secret=True)
    metrics_private: bool = _setting(False, _truth, "Ask for an admin key on /metrics too.")
    allow_origin: tuple[str, ...] = _setting((), _names, "Browser origin that may call the API; repeatable, * for all.")
    grace: float = _setting(30.0, _number, "Seconds that running requests have to finish on SIGTERM.")
    max_queued_requests: int = _setting(1024, _at_least(0), "Choices that may wait beyond the free rows; then 429.")
    max_queued_tokens: int = _setting(1_000_000, _at_least(0), "Prompt tokens that may wait; then 429.")
    context_policy: str = _setting(
        "refuse", _one_of("refuse", "queue"), "Over a context limit that was lowered for now: 503, or wait."
    )
    max_body: int = _setting(8 << 20, _at_least(1024, byte_size), "Largest request body, e.g. 8MiB.")
    request_timeout: float = _setting(600.0, _number, "Seconds until a request is given up; 0 = never.")
    slow_request: float = _setting(30.0, _number, "Seconds from which a request is logged with its stages; 0 = none.")
    sample_requests: float = _setting(0.0, _share, "Share of requests kept in the journal without their texts, 0-1.")
    progress_deadline: float = _setting(60.0, _number, "Seconds without engine progress until readiness is false.")
    without: tuple[str, ...] = _setting((), _names, "Features to serve without, to see what they are worth.")
    tuner: bool = _setting(True, _truth, "Find good limits while serving, and keep them good.")
    tune_for: str | None = _setting(
        None, _one_of("chat", "batch", "agent"), "What it is for: targets and first limits of a kind of use."
    )
    target_ttft: float = _setting(0.0, _number, "Target of the time to first token, p95, in seconds; 0 = none.")
    target_inter_token: float = _setting(0.0, _number, "Target of the gap between tokens, p95, in seconds; 0 = none.")
    drill: tuple[str, ...] = _setting((), _names, "Arm a fault drill, or all; POST /inferd/v1/drill/NAME starts it.")
    log_format: str = _setting("text", _one_of("text", "json"), "How the log is written to stderr.")
    log_level: str = _setting("info", _one_of("debug", "info", "warning", "error"), "How much is logged.")


NAMES: Final = tuple(f.name for f in fields(Settings))


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, where each came from, and the file that was read, if any."""

    settings: Settings
    provenance: dict[str, str]
    file: Path | None

    def public(self) -> dict[str, dict[str, Any]]:
        """Every setting with its source; secrets are only said to be there."""
        shown = {}
        for f in fields(Settings):
            value = getattr(self.settings, f.name)
            if f.metadata["secret"] and value is not None:
                value = "(set)"
            shown[f.name] = {"value": value, "source": self.provenance[f.name]}
        return shown


def load(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config: str | None = None,
    profile: str | None = None,
) -> Loaded:
    """Read all sources. `flags`: those given, by name; `profile`: a file of settings that `inferd tune search` found.
    Raises ConfigError."""
    environ = os.environ if environ is None else environ
    file = find_file(config, environ)
    values: dict[str, Any] = {f.name: f.default for f in fields(Settings)}
    provenance = dict.fromkeys(NAMES, "default")
    sources = [(f"file {file}", read_file(file)) if file else ("", {})]
    sources.append((f"profile {profile}", read_file(Path(profile))) if profile else ("", {}))
    sources.append(("env", _from_environ(environ)))
    sources.append(("flag", {name: value for name, value in (flags or {}).items() if value not in (None, ())}))
    for source, found in sources:
        for name, value in found.items():
            where = {"env": f"env {PREFIX}{name.upper()}", "flag": f"flag --{name.replace('_', '-')}"}.get(
                source, source
            )
            values[name] = _parsed(name, value, where)
            provenance[name] = where
    return Loaded(Settings(**values), provenance, file)


def find_file(config: str | None, environ: Mapping[str, str]) -> Path | None:
    """The first of: --config, $INFERD_CONFIG (these two must exist), ./inferd.toml, the user's, the system's."""
    asked = config or environ.get("INFERD_CONFIG")
    if asked:
        return Path(asked)
    home = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "/")) / ".config")
    places = (Path("inferd.toml"), Path(home) / "inferd" / "config.toml", Path("/etc/inferd/config.toml"))
    return next((place for place in places if place.is_file()), None)


def read_file(file: Path) -> dict[str, Any]:
    """A configuration file as name → value. Raises ConfigError for one that cannot be read or has unknown names."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    for name in found:
        _known(name, f"in {file}")
    return found


def _from_environ(environ: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in _OTHER_VARIABLES or _service_link(variable, value):
            continue
        name = variable.removeprefix(PREFIX).lower()
        _known(name, f"as {variable}")
        if value:
            found[name] = value
    return found


def _service_link(variable: str, value: str) -> bool:
    """Kubernetes announces a service named 'inferd' to every pod by variables of this shape; they are not ours."""
    return variable.startswith(("INFERD_SERVICE_", "INFERD_PORT_")) or (
        variable == "INFERD_PORT" and value.startswith(("tcp://", "udp://"))
    )


def _known(name: str, where: str) -> None:
    if name not in NAMES:
        nearest = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]}?" if nearest else "see inferd.example.toml"
        raise ConfigError(f"unknown setting {name!r} {where}", hint)


def _parsed(name: str, value: Any, where: str) -> Any:
    parse: Callable[[Any], Any] = next(f.metadata["parse"] for f in fields(Settings) if f.name == name)
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"{name} ({where}): {error}") from error
