"""What the tuner has learned, kept over restarts: one file in the state directory, an entry per model, device, scheme
of the weights and version.

Owns the file and its shape. A file that cannot be read or is of another shape is no reason not to serve: it counts as
empty, and says so once by `Memory.trouble`. It must not know how anything is learned. Enter at `Memory`.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from engine.budget import Resolved
from engine.stepcost import StepCost

FILE_NAME = "tuner.json"
_MOST_ENTRIES = 16


class Learned(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One entry. `limits` are those that were kept, not what was being tried."""

    limits: dict[str, int] = {}
    cost: dict[str, float] = {}
    cost_error: float = 0.0
    prompt_tokens: float = 0.0
    output_quantile: float = 0.0
    footprint: float = 0.0
    fixed_bytes: int = 0  # in use beside the active blocks, as measured
    resolved: dict[str, Any] = {}
    frozen: bool = False
    pinned: list[str] = []
    decisions: int = 0

    def step_cost(self) -> StepCost | None:
        return StepCost(**self.cost) if self.cost else None


class _File(msgspec.Struct, kw_only=True):
    entries: dict[str, Learned] = {}


def key(model: str, resolved: Resolved, version: str) -> str:
    """What was learned for one is not true of another. How weights are quantized is told by what they take: a name may
    stand for another file tomorrow, and one file is kept packed or not."""
    scheme = f"{resolved.dtype}, weights of {resolved.weights_bytes} bytes"
    return f"{model}|{resolved.device}|{scheme}|{version}"


class Memory:
    """The file in `directory`; written whole, so that a kill leaves the one before."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self.trouble = ""
        self._entries = self._read()

    def get(self, name: str) -> Learned | None:
        return self._entries.get(name)

    def names(self) -> list[str]:
        """Every entry's key, the last written one last."""
        return list(self._entries)

    def put(self, name: str, learned: Learned) -> None:
        """Raises OSError if the disk does not take it; what is known in here stays."""
        self._entries.pop(name, None)
        self._entries[name] = learned
        for oldest in list(self._entries)[:-_MOST_ENTRIES]:
            del self._entries[oldest]
        text = msgspec.json.format(msgspec.json.encode(_File(entries=self._entries)))
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{FILE_NAME}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(self.path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _read(self) -> dict[str, Learned]:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=_File).entries
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            self.trouble = f"{self.path} cannot be used, so nothing is known from before: {error}"
            return {}
