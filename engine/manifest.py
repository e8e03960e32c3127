"""Manifest: a prepared model on disk, ready for offline start: what `inferd models prepare` writes and everyone reads.

A prepared directory holds `manifest.json`, `tokenizer.json`, perhaps `chat_template.jinja`, and, if the source was a
GGUF, `model.safetensors` with its weights under Hugging Face names: in the blocks of the GGUF where the kernels take
these (`blocks`; uint8 rows), else dequantized. For a Hugging Face source the weights stay
where they are and `weights` points there. Stdlib only: the device plane reads it on a bare machine.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import CorruptModel
from engine.modelspec import ModelSpec

VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`digest` is the content hash of the source: it salts the prefix cache and names what was learned of the model."""

    spec: ModelSpec
    digest: str
    source: str  # where it came from, for people
    name: str  # default served name
    weights: tuple[str, ...]  # safetensors files: absolute, or relative to the prepared directory
    weights_dtype: str  # dtype of most bytes on disk
    weights_bytes: int
    parameters: int
    bytes_by_dtype: dict[str, int]  # of the source: e.g. {"Q4_1": 81e6, "F32": 1e5}
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool = False
    has_chat_template: bool = False
    blocks: dict[str, str] = field(default_factory=dict)  # tensor → ggml's block format, of those kept in one
    version: int = VERSION

    def save(self, directory: Path) -> None:
        """Write manifest.json; the caller makes the whole directory appear at once by renaming it."""
        (directory / "manifest.json").write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, directory: Path | str) -> "Manifest":
        """Raises CorruptModel when manifest.json is missing, malformed or of another version."""
        path = Path(directory) / "manifest.json"
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if data.get("version") != VERSION:
                raise ValueError(f"version {data.get('version')}, expected {VERSION}")
            data["spec"] = ModelSpec.from_dict(data["spec"])
            data["weights"] = tuple(data["weights"])
            data["eos_token_ids"] = tuple(data["eos_token_ids"])
            return cls(**data)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CorruptModel(
                f"{path} is not a usable manifest: {error}", "run `inferd models prepare` again"
            ) from error

    def weight_paths(self, directory: Path | str) -> list[Path]:
        return [Path(directory) / w for w in self.weights]
