"""`python -m engine.prepare SOURCE DEST [NAME [DIGEST]]`: make a model ready to be served; what is dear is done here.

SOURCE is a .gguf file or a Hugging Face directory (config.json + safetensors); DEST appears at once, whole, or not at
all. Progress goes to standard output as JSON lines; an error is one JSON line and the exit code of engine.errors. Runs
in a process of its own because it imports gguf and numpy. What it writes: engine/manifest.py. Weights never are in
memory as a whole; the files are checked first, so that a damaged one costs nothing.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, CorruptModel, InferdError, ModelError, TokenizerError, UnknownArchitecture
from engine.load.safetensors_file import Entry, read_header, write
from engine.manifest import Manifest
from engine.modelspec import ModelSpec, from_hf_config
from engine.names import expected, gguf_name, interleaved
from engine.source import Progress, Source, read_json

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Control tokens that end a turn where the chat template writes them, whatever the header calls the end token.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>")
_CONTROL = 3  # tokenizer.ggml.token_type
_SPARE_BYTES = 64 << 20  # of disk, left alone


def prepare(source: Source, target: Path, name: str, digest: str, progress: Progress) -> Manifest:
    """Make `target` from `source`. `digest` is the source's, if it is known already. Nothing is left behind
    if it fails. Raises ModelError and its kin, ConfigError."""
    if target.exists():
        return Manifest.load(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ConfigError(f"cannot write in {target.parent}: {error.strerror}", "set XDG_CACHE_HOME") from error
    try:
        make = _from_gguf if source.is_gguf else _from_directory
        manifest = make(source, scratch, name, digest or source.digest(progress), progress)
        manifest.save(scratch)
        for path in (*scratch.iterdir(), scratch):
            _sync(path)
        scratch.rename(target)
        _sync(target.parent)
        return manifest
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error.strerror or error}", "free some disk space") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _from_gguf(source: Source, scratch: Path, name: str, digest: str, progress: Progress) -> Manifest:
    from engine.load.gguf import Gguf
    from engine.load.gguf_tokenizer import adds_bos, convert

    progress("header", 0.0)
    file = Gguf.open(source.path)
    meta = file.metadata
    spec = file.spec()
    entries = _checked(file.entries(), spec, f"{source.path}")
    stored = {ours: file.tensors[gguf_name(ours)].stored for ours in entries}
    _check_room(scratch, sum(entry.bytes for entry in stored.values()))
    progress("tokenizer", 0.0)
    convert(meta).save(str(scratch / "tokenizer.json"))
    template = str(meta.get("tokenizer.chat_template") or "")
    if template:
        (scratch / "chat_template.jinja").write_text(template, encoding="utf-8")
    total, done = sum(entry.bytes for entry in stored.values()), 0

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        progress("weights", done / total)

    reordered = meta["general.architecture"] == "llama"
    write(
        scratch / "model.safetensors",
        stored,
        lambda ours: file.pieces(gguf_name(ours), spec.head_dim if reordered and interleaved(ours) else None),
        wrote,
    )
    return Manifest(
        spec=spec,
        digest=digest,
        source=str(source.path),
        name=name,
        weights=("model.safetensors",),
        bytes_by_dtype=file.bytes_by_type(),
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_gguf_ends(meta, template),
        add_bos=adds_bos(meta),
        has_chat_template=bool(template),
        blocks={ours: kept for ours in entries if (kept := file.tensors[gguf_name(ours)].kept)},
        **_totals(entries) | {"weights_bytes": total},
    )


def _from_directory(source: Source, scratch: Path, name: str, digest: str, progress: Progress) -> Manifest:
    progress("header", 0.0)
    config = read_json(source.path / "config.json")
    if "auto_map" in config:
        raise UnknownArchitecture(
            f"{source.path} wants its own code to be run (auto_map)", "inferd runs no remote code"
        )
    spec = from_hf_config(config)
    headers = [read_header(path) for path in source.weights]
    held = {name: entry for header in headers for name, entry in header.items()}
    entries = _checked(held, spec, str(source.path))
    if not (source.path / "tokenizer.json").is_file():
        raise TokenizerError(f"{source.path} has no tokenizer.json", "save it once with transformers' fast tokenizer")
    shutil.copyfile(source.path / "tokenizer.json", scratch / "tokenizer.json")
    settings = read_json(source.path / "tokenizer_config.json")
    template = _template(source.path, settings)
    if template:
        (scratch / "chat_template.jinja").write_text(template, encoding="utf-8")
    bos = _token_id(source.path, settings.get("bos_token"))
    return Manifest(
        spec=spec,
        digest=digest,
        source=str(source.path),
        name=name,
        weights=tuple(str(path) for path in source.weights),
        bytes_by_dtype=dict(_by_dtype(entries)),
        bos_token_id=config.get("bos_token_id") if bos is None else bos,
        eos_token_ids=_ends(source.path, config, settings),
        add_bos=_adds_bos(scratch / "tokenizer.json", bos),
        has_chat_template=bool(template),
        **_totals(entries),
    )


def _checked(found: dict[str, Entry], spec: ModelSpec, where: str) -> dict[str, Entry]:
    """What the model needs of `found`. Raises CorruptModel for what lacks or has another shape than the spec says."""
    wanted = expected(spec)
    for name, shape in wanted.items():
        if name not in found:
            raise CorruptModel(f"{where} has no tensor {name}", "download the model again")
        if found[name].shape != shape:
            raise CorruptModel(f"{where}: tensor {name} has shape {list(found[name].shape)}, expected {list(shape)}")
        if found[name].dtype not in _DTYPES:
            kinds = ", ".join(_DTYPES)
            raise UnknownArchitecture(f"{where}: tensor {name} is {found[name].dtype}", f"served are {kinds}")
    return {name: found[name] for name in wanted}


def _by_dtype(entries: dict[str, Entry]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for entry in entries.values():
        counts[entry.dtype] += entry.bytes
    return counts


def _totals(entries: dict[str, Entry]) -> dict[str, Any]:
    """The manifest's figures of the weights that are served."""
    by_dtype = _by_dtype(entries)
    return {
        "weights_dtype": _DTYPES[by_dtype.most_common(1)[0][0]],
        "weights_bytes": by_dtype.total(),
        "parameters": sum(entry.items for entry in entries.values()),
    }


def _check_room(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed + _SPARE_BYTES > free:
        raise ModelError(
            f"{directory.parent} has {free >> 20} MiB free; the weights take {needed >> 20} MiB once prepared",
            "free some, or set XDG_CACHE_HOME to a place with more",
        )


def _gguf_ends(meta: dict[str, Any], template: str) -> tuple[int, ...]:
    """The end token first, then what else ends a turn."""
    pieces: list[str] = meta["tokenizer.ggml.tokens"]
    types = meta.get("tokenizer.ggml.token_type") or [_CONTROL] * len(pieces)
    said = [meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ends = [int(token) for token in said if token is not None]
    written = {end for end in _TURN_ENDS if end in template}
    ends += [index for index, piece in enumerate(pieces) if piece in written and types[index] == _CONTROL]
    return tuple(dict.fromkeys(ends))


def _template(path: Path, settings: dict[str, Any]) -> str:
    """The chat template, of the three places where it may stand; of several, the default one."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_json(path / "chat_template.json").get("chat_template") or settings.get("chat_template") or ""
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or ""
    return str(template)


def _ends(path: Path, config: dict[str, Any], settings: dict[str, Any]) -> tuple[int, ...]:
    """The tokenizer's end token first, as templates write it; then generation_config.json's, else config.json's."""
    said = read_json(path / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    own = _token_id(path, settings.get("eos_token"))
    ends = [own, *(said if isinstance(said, list) else [said])]
    return tuple(dict.fromkeys(int(end) for end in ends if end is not None))


def _token_id(path: Path, token: Any) -> int | None:
    """The id of a special token of tokenizer_config.json: a string, or an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    added = read_json(path / "tokenizer.json").get("added_tokens") or []
    return next((int(entry["id"]) for entry in added if entry.get("content") == content), None)


def _adds_bos(tokenizer_file: Path, bos: int | None) -> bool:
    """Whether a plain prompt begins with the begin mark: what the tokenizer itself does. Raises TokenizerError."""
    from tokenizers import Tokenizer

    try:
        ids = Tokenizer.from_file(str(tokenizer_file)).encode("a").ids
    except Exception as error:
        raise TokenizerError(f"{tokenizer_file.name} is not usable: {error}") from error
    return bos is not None and ids[:1] == [bos]


def main(arguments: list[str]) -> int:
    """Exit codes are those of engine.errors."""

    def progress(stage: str, share: float) -> None:
        print(json.dumps({"stage": stage, "share": round(share, 3)}), flush=True)

    try:
        if not 2 <= len(arguments) <= 4:
            raise ConfigError("usage: python -m engine.prepare SOURCE DEST [NAME [DIGEST]]")
        source, target, name, digest = (*arguments, *("", "", "")[: 4 - len(arguments)])
        prepare(Source.at(Path(source)), Path(target), name or Path(source).stem, digest, progress)
    except InferdError as error:
        report = {"error": error.message, "hint": error.hint, "code": error.code, "kind": type(error).__name__}
        print(json.dumps(report), flush=True)
        return error.exit_code
    return 0


def _leave(signum: int, frame: object) -> None:
    """What was begun is removed on the way out; a second signal must not interrupt that."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main(sys.argv[1:]))
