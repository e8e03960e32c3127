"""`python -m engine.prepare SOURCE DEST`: make a model ready to be served: everything dear is done here, once.

SOURCE is a .gguf file or a Hugging Face directory (config.json + safetensors); DEST appears at once, whole, or not at
all. Progress goes to standard output as JSON lines; an error is one JSON line and the exit code of engine.errors. Runs
in a process of its own because it imports gguf and numpy and uses memory. What it writes: engine/manifest.py.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, CorruptModel, InferdError, MissingShard, ModelError, TokenizerError
from engine.manifest import Manifest
from engine.modelspec import from_hf_config

Progress = Callable[[str, float], None]

# Control tokens that end a turn, whatever the header calls the end token.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "</s>")
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def prepare(source: Path, target: Path, name: str, progress: Progress) -> Manifest:
    """Make `target` from `source`. Raises ModelError and its kin; leaves nothing behind if it fails."""
    if target.exists():
        return Manifest.load(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write = _from_gguf if source.is_file() else _from_hugging_face
        manifest = write(source, scratch, name, progress)
        manifest.save(scratch)
        for path in (*scratch.iterdir(), scratch):
            _sync(path)
        scratch.rename(target)
        return manifest
    except OSError as error:
        if target.exists():  # somebody else was faster, with the same content
            return Manifest.load(target)
        raise ModelError(f"could not write {target}: {error.strerror or error}", "free some disk space") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _from_gguf(source: Path, scratch: Path, name: str, progress: Progress) -> Manifest:
    from engine.load.gguf import GGUF
    from engine.load.gguf_tokenizer import adds_bos, convert

    progress("header", 0.0)
    file = GGUF(source)
    spec = file.spec()
    convert(file.metadata).save(str(scratch / "tokenizer.json"))
    template = file.metadata.get("tokenizer.chat_template")
    if template:
        (scratch / "chat_template.jinja").write_text(str(template), encoding="utf-8")
    size = file.write_safetensors(scratch / "model.safetensors", progress)
    progress("digest", 0.0)
    return Manifest(
        spec=spec,
        digest=file.digest(),
        source=str(source),
        name=name,
        weights=("model.safetensors",),
        weights_dtype="float32",
        weights_bytes=size,
        parameters=file.parameters,
        bytes_by_dtype=file.bytes_by_dtype(),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_gguf_ends(file.metadata),
        add_bos=adds_bos(file.metadata),
        has_chat_template=bool(template),
    )


def _gguf_ends(metadata: dict[str, Any]) -> tuple[int, ...]:
    """The end token first, then every other control token that ends a turn."""
    pieces: list[str] = metadata["tokenizer.ggml.tokens"]
    ends = [metadata[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in metadata]
    types = metadata.get("tokenizer.ggml.token_type") or []
    ends += [index for index, piece in enumerate(pieces) if piece in _ENDS and (not types or types[index] == 3)]
    return tuple(dict.fromkeys(int(end) for end in ends))


def _from_hugging_face(source: Path, scratch: Path, name: str, progress: Progress) -> Manifest:
    progress("header", 0.0)
    config = _json(source / "config.json")
    if "auto_map" in config:
        raise ModelError(f"{source} wants its own code to be run (auto_map)", "inferd runs no remote code")
    spec = from_hf_config(config)
    shards = _shards(source)
    counts, parameters = _counts(shards)
    if not (source / "tokenizer.json").is_file():
        raise TokenizerError(f"{source} has no tokenizer.json", "save it with a fast tokenizer")
    shutil.copyfile(source / "tokenizer.json", scratch / "tokenizer.json")
    tokenizer = _json(source / "tokenizer_config.json", optional=True)
    template = _hf_template(source, tokenizer)
    if template:
        (scratch / "chat_template.jinja").write_text(template, encoding="utf-8")
    most = max(counts, key=lambda kind: counts[kind])
    return Manifest(
        spec=spec,
        digest=_hf_digest(source, shards),
        source=str(source),
        name=name,
        weights=tuple(str(path.resolve()) for path in shards),
        weights_dtype=_DTYPES.get(most, most),
        weights_bytes=sum(path.stat().st_size for path in shards),
        parameters=parameters,
        bytes_by_dtype=counts,
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_hf_ends(source, config, tokenizer),
        add_bos=bool(tokenizer.get("add_bos_token", False)),
        has_chat_template=bool(template),
    )


def _json(path: Path, optional: bool = False) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if optional:
            return {}
        raise CorruptModel(f"{path} is not there", "a model directory has config.json and safetensors") from error
    except (OSError, ValueError) as error:
        raise CorruptModel(f"{path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise CorruptModel(f"{path} is not a JSON object")
    return data


def _shards(source: Path) -> list[Path]:
    index = source / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_json(index).get("weight_map", {}).values()))
        shards = [source / str(shard) for shard in names]
        missing = [path.name for path in shards if not path.is_file()]
        if missing:
            raise MissingShard(f"{source} lacks {', '.join(missing)}", "download the model again")
        return shards
    if (source / "model.safetensors").is_file():
        return [source / "model.safetensors"]
    if any(source.glob("*.bin")) or any(source.glob("*.pt")):
        raise ModelError(f"{source} has only pickled weights", "inferd opens no pickles: convert them to safetensors")
    raise MissingShard(f"{source} has no model.safetensors", "download the model again")


def _counts(shards: list[Path]) -> tuple[dict[str, int], int]:
    """(bytes by dtype, parameters), from the headers; which must be whole."""
    from engine.load.safetensors_header import read_entries

    counts: Counter[str] = Counter()
    parameters = 0
    for path in shards:
        for kind, begin, end in read_entries(path):
            counts[kind] += end - begin
            parameters += (end - begin) // _WIDTHS.get(kind, 1)
    return dict(counts), parameters


def _hf_template(source: Path, tokenizer: dict[str, Any]) -> str:
    path = source / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer.get("chat_template") or ""
    if isinstance(template, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or ""
    return str(template)


def _hf_ends(source: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json's end tokens, else config.json's; and the tokenizer's own, which ends a turn."""
    said = _json(source / "generation_config.json", optional=True).get("eos_token_id", config.get("eos_token_id"))
    ends = [int(end) for end in (said if isinstance(said, list) else [said]) if end is not None]
    token = tokenizer.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    added = _json(source / "tokenizer.json").get("added_tokens", [])
    ends += [int(entry["id"]) for entry in added if entry.get("content") == content]
    return tuple(dict.fromkeys(ends))


def _hf_digest(source: Path, shards: list[Path]) -> str:
    """Of the small files' content, and of each shard's size, header and time of change: hashing gigabytes of weights at
    every start would cost more than it proves, and a file that changes changes its time."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        path = source / name
        digest.update(path.read_bytes() if path.is_file() else b"-")
    for path in shards:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
        with path.open("rb") as file:
            digest.update(file.read(min(stat.st_size, 1 << 16)))
    return digest.hexdigest()


def main(arguments: list[str]) -> int:
    """Exit codes are those of engine.errors."""

    def progress(stage: str, share: float) -> None:
        print(json.dumps({"stage": stage, "share": round(share, 3)}), flush=True)

    try:
        if len(arguments) != 3:
            raise ConfigError("usage: python -m engine.prepare SOURCE DEST NAME")
        prepare(Path(arguments[0]), Path(arguments[1]), arguments[2], progress)
    except InferdError as error:
        report = {"error": error.message, "hint": error.hint, "code": error.code, "kind": type(error).__name__}
        print(json.dumps(report), flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
