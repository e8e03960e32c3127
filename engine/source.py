"""Source: the files that a model comes as: one .gguf file, or a Hugging Face directory with safetensors.

Owns which files those are, whether they are all there, and two names for their content: `fingerprint`, from sizes and
times alone, so that a later start need not read gigabytes; and `digest`, the content's. Stdlib only: the library asks
before it starts the process that does the work. Enter at `Source.at`.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, CorruptModel, MissingShard, ModelError
from engine.manifest import VERSION

Progress = Callable[[str, float], None]

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.json",
    "chat_template.jinja",
    _INDEX,
)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_HASH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """`weights` are the files with tensors, `texts` the small files beside them (none for a GGUF)."""

    path: Path
    weights: tuple[Path, ...]
    texts: tuple[Path, ...] = ()

    @property
    def is_gguf(self) -> bool:
        return not self.texts

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.weights)

    @classmethod
    def at(cls, path: Path) -> "Source":
        """Raises ConfigError if nothing is there, ModelError (MissingShard, CorruptModel) for what cannot be used."""
        path = path.expanduser().absolute()
        if path.is_file():
            if path.suffix == ".gguf" or _begins_as_gguf(path):
                return cls(path, (path,))
            raise ModelError(f"{path} is not a GGUF file", "give a .gguf file, or a directory with config.json")
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise CorruptModel(f"{path} has no config.json", "a model directory has config.json and safetensors")
            texts = tuple(path / name for name in _TEXT_FILES if (path / name).is_file())
            return cls(path, _shards(path), texts)
        raise ConfigError(f"{path} does not exist", "give a .gguf file, a model directory, or a name of the library")

    def fingerprint(self) -> str:
        """Changes whenever a file is replaced or written to; costs one stat a file."""
        digest = hashlib.sha256(str(self.path.resolve()).encode())
        for path in (*self.texts, *self.weights):
            stat = path.stat()
            digest.update(f"\n{path.name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}".encode())
        return digest.hexdigest()

    def digest(self, progress: Progress) -> str:
        """Of a GGUF the sha256 of its content. Of a directory the sha256 over its small files' content and each shard's
        header, size and time of change: hashing all of a hundred gigabytes before a first start costs minutes, and
        whatever rewrites weights in place changes the time. A file of the hub's cache is named by its own sha256, which
        then stands for the time."""
        digest = hashlib.sha256()
        if self.is_gguf:
            total, done = self.bytes or 1, 0
            with self.path.open("rb") as file:
                while piece := file.read(_HASH_BYTES):
                    digest.update(piece)
                    done += len(piece)
                    progress("checksum", done / total)
            return digest.hexdigest()
        for path in self.texts:
            digest.update(f"{path.name}\n".encode() + path.read_bytes())
        for path in self.weights:
            digest.update(f"\n{path.name} {path.stat().st_size} {_identity(path)}\n".encode() + _raw_header(path))
        return digest.hexdigest()

    def key(self, digest: str) -> str:
        """The name of the prepared directory. A directory's weights stay where they are, so its place counts too."""
        place = "" if self.is_gguf else "-" + hashlib.sha256(str(self.path).encode()).hexdigest()[:8]
        return f"{digest[:32]}{place}-v{VERSION}"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} if there is no such file. Raises CorruptModel."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CorruptModel(f"{path} is not readable JSON: {error}", "download the model again") from error
    if not isinstance(data, dict):
        raise CorruptModel(f"{path} is not a JSON object")
    return data


def _begins_as_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _shards(path: Path) -> tuple[Path, ...]:
    index = path / _INDEX
    if index.is_file():
        listed = read_json(index).get("weight_map")
        names = sorted({str(name) for name in listed.values()}) if isinstance(listed, dict) else []
        if not names or any(Path(name).name != name for name in names):
            raise CorruptModel(f"{index} lists no shards of this directory", "download the model again")
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
            raise MissingShard(
                f"{path} lacks {len(missing)} of {len(names)} shards: {shown}", "download the model again"
            )
        return tuple(path / name for name in names)
    if (path / _SINGLE).is_file():
        return (path / _SINGLE,)
    if any(next(path.glob(pattern), None) for pattern in _PICKLES):
        raise ModelError(f"{path} has only pickled weights", "a pickle can run code: convert them to safetensors")
    raise MissingShard(f"{path} has neither {_SINGLE} nor {_INDEX}", "download the model again")


def _identity(path: Path) -> str:
    blob = path.resolve().name
    named_by_content = path.is_symlink() and len(blob) == 64 and all(c in "0123456789abcdef" for c in blob)
    return blob if named_by_content else str(path.stat().st_mtime_ns)


def _raw_header(path: Path) -> bytes:
    """A safetensors header as it is; whether it is whole is for others to say."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(min(length, 100 << 20))
