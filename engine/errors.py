"""Every error that the engine raises on purpose.

    InferdError
    ├── ConfigError            what was asked cannot be (flag, file, value)                       exit 2
    ├── ModelError             the model's files are not usable                                   exit 3
    │   ├── UnknownArchitecture · CorruptModel · MissingShard · HashMismatch · TokenizerError
    ├── DoesNotFit             the plan at start needs more memory than there is                  exit 4
    ├── RequestError           one request cannot be served; nothing else is touched
    │   ├── ContextTooLong · DeadlineExceeded · OutOfMemory (translated in device/runner.py)
    └── EngineFault            the engine cannot go on                                            exit 5

`code` is the stable, bounded name that reaches API errors, logs and records; `hint` says what to do next.
It must not import anything: both planes, the daemon and the commands share it.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Memory at one moment under the limit that is nearest; None = not measured. Fields: telemetry.evidence.Reading."""

    at_ns: int
    scope: str
    limit_bytes: int | None = None
    free_bytes: int | None = None
    own_bytes: int | None = None
    kv_bytes: int | None = None
    neighbour_bytes: int | None = None
    allocator_free_bytes: int | None = None
    largest_free_bytes: int | None = None
    typical_step_bytes: int | None = None


class InferdError(Exception):
    """Base. `exit_code` is what a command ends with when the error reaches its top."""

    code: ClassVar[str] = "internal_error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(InferdError):
    """A setting is unknown, malformed or contradicts another."""

    code = "config_error"
    exit_code = 2


class ModelError(InferdError):
    """The model's files cannot be used."""

    code = "model_error"
    exit_code = 3


class UnknownArchitecture(ModelError):
    """No decoder family of ours is meant for this model."""

    code = "unknown_architecture"


class CorruptModel(ModelError):
    """A file is truncated, malformed, or disagrees with its header."""

    code = "corrupt_model"


class MissingShard(ModelError):
    """The index names a file that is not there."""

    code = "missing_shard"


class HashMismatch(ModelError):
    """A file's digest is not the expected one."""

    code = "hash_mismatch"


class TokenizerError(ModelError):
    """The tokenizer or its chat template is missing or unusable."""

    code = "tokenizer_error"


class DoesNotFit(InferdError):
    """The plan needs more memory than the limit; the message names the largest setting that fits."""

    code = "does_not_fit"
    exit_code = 4


class RequestError(InferdError):
    """One request cannot be served."""

    code = "request_error"


class ContextTooLong(RequestError):
    """Prompt plus output would exceed the context limit in force."""

    code = "context_length_exceeded"


class DeadlineExceeded(RequestError):
    """The request's deadline passed before it ended."""

    code = "deadline_exceeded"


class OutOfMemory(RequestError):
    """An allocation failed on the device.

    `requested_bytes` and `free_bytes` are 0 where the allocator did not say. `phase` is what the step was at
    (engine/pulse.py), `row` whose part it was, if it was one row's. `readings`: first, before the step, and now.
    """

    code = "out_of_memory"

    def __init__(self, message: str, hint: str = "", *, requested_bytes: int = 0, free_bytes: int = 0) -> None:
        super().__init__(message, hint)
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes
        self.phase = ""
        self.row: int | None = None
        self.readings: tuple[MemoryReading, MemoryReading, MemoryReading] | None = None


class EngineFault(InferdError):
    """The engine process cannot go on; the daemon restarts it."""

    code = "engine_fault"
    exit_code = 5
