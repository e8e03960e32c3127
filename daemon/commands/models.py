"""`inferd models`: what is on this machine, fetching and preparing it, what it takes to serve it, and removing it.

Owns the flags and what is printed; daemon/library.py does the work. Enter at `command`.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click

from daemon.library import Library, Prepared
from daemon.paths import cache_dir
from daemon.progress import Progress
from daemon.settings import byte_size
from engine.budget import Limits, Resolved, memory_plan, readable, resolve
from engine.config import DTYPES, EngineConfig
from engine.errors import ConfigError
from engine.kv.layout import DTYPE_BYTES, blocks_for
from engine.machine import host_facts
from engine.manifest import Manifest

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class _BytesType(click.ParamType[int]):
    """1200MiB, 2GiB, or a number of bytes."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return byte_size(value)
        except ValueError as reason:
            self.fail(str(reason), param, ctx)


@contextmanager
def _library() -> Iterator[Library]:
    progress = Progress()
    try:
        yield Library(cache_dir(), progress)
    finally:
        progress.done()


@click.group()
def command() -> None:
    """The models on this machine.

    A MODEL is a name of the catalogue (smollm2), a path to a .gguf file, a path to a Hugging Face directory
    (config.json and safetensors), or a hub id (org/name). Serving fetches and prepares what is not there yet; these
    commands do it ahead of time, and everything after that works offline.
    """


@command.command("list")
@_as_json
def list_models(as_json: bool) -> None:
    """What is here, and what the catalogue offers."""
    with _library() as library:
        entries = library.entries()
    if as_json:
        click.echo(json.dumps([asdict(entry) for entry in entries], indent=2))
        return
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        disk = readable(entry.disk_bytes) if entry.disk_bytes else "-"
        click.echo(f"{entry.name:<{width}}  {entry.state:<9}  {disk:>9}  {entry.about}")


@command.command()
@click.argument("model")
@_as_json
def pull(model: str, as_json: bool) -> None:
    """Fetch MODEL's files and verify them; an interrupted download goes on where it stopped."""
    with _library() as library:
        path = library.pull(model)
    click.echo(json.dumps({"model": model, "path": str(path)}) if as_json else f"{model}: {path}")


@command.command()
@click.argument("model")
@_as_json
def prepare(model: str, as_json: bool) -> None:
    """Make MODEL ready to be served: fetched, checked, its tokenizer converted, GGUF weights dequantized. Done once."""
    with _library() as library:
        prepared = library.prepare(model)
    if as_json:
        click.echo(json.dumps({"model": model, "directory": str(prepared.directory)}))
    else:
        click.echo(f"{model}: ready in {prepared.directory}")


@command.command()
@click.argument("model")
@_as_json
def rm(model: str, as_json: bool) -> None:
    """Remove MODEL from the cache and say what that frees. Files that were given by path stay."""
    with _library() as library:
        freed = library.remove(model)
    click.echo(json.dumps({"model": model, "freed_bytes": freed}) if as_json else f"{model}: {readable(freed)} freed")


@command.command()
@click.argument("model")
@click.option("--memory-limit", type=_BytesType(), help="Most memory for all of inferd, e.g. 1200MiB.")
@click.option("--max-model-len", type=click.IntRange(1), help="Context that must fit, in tokens.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Sequences that are to run at once.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Of weights and KV.")
@_as_json
def inspect(model: str, as_json: bool, **asked: Any) -> None:
    """What MODEL is, what a token of it costs, and what fits into this machine or into --memory-limit.

    The split is the plan that `inferd serve` would make on this host's CPU. Nothing is loaded.
    """
    with _library() as library:
        found = library.find(model)
    if found is None:
        raise ConfigError(f"{model} is not prepared", f"`inferd models prepare {model}` does that once")
    asked["memory_limit_bytes"] = asked.pop("memory_limit")
    config = EngineConfig(model_dir=str(found.directory), **asked)
    facts = describe(found)
    if not as_json:
        click.echo("\n".join(_described(found.manifest, facts)))
    # After the facts: a plan that does not fit is an error, and the facts say why.
    resolved, limits = resolve(config, found.manifest, host_facts(config, found.manifest))
    if as_json:
        click.echo(json.dumps({**facts, "plan": _plan(resolved, limits)}, indent=2))
    else:
        click.echo("\n".join(_planned(resolved, limits)))


def describe(found: Prepared) -> dict[str, Any]:
    """The facts of a prepared model."""
    manifest = found.manifest
    return {
        "model": found.name,
        "source": manifest.source,
        "directory": str(found.directory),
        "digest": manifest.digest,
        "architecture": manifest.spec.to_dict(),
        "parameters": manifest.parameters,
        "bytes_by_dtype": manifest.bytes_by_dtype,
        "weights_bytes_on_disk": manifest.weights_bytes,
        "kv_bytes_per_token": {dtype: manifest.spec.kv_bytes_per_token(width) for dtype, width in DTYPE_BYTES.items()},
        "chat_template": manifest.has_chat_template,
    }


def _described(manifest: Manifest, facts: dict[str, Any]) -> list[str]:
    spec = manifest.spec
    row: Callable[[str, str], str] = "{:<14}{}".format
    windows = {window for window in spec.sliding_windows if window}
    return [
        row("model", facts["model"]),
        row("source", manifest.source),
        row("prepared in", facts["directory"]),
        row(
            "architecture",
            f"{spec.family}: {spec.num_layers} layers of {spec.hidden_size}, MLP {spec.intermediate_size}",
        ),
        row("attention", f"{spec.num_heads} query heads on {spec.num_kv_heads} KV heads of {spec.head_dim}"),
        *([row("", f"sliding window of {min(windows)} tokens")] if windows else []),
        row("context", f"{spec.max_position} positions, rope base {spec.rope_theta:g}"),
        row("vocabulary", f"{spec.vocab_size}{', tied with the output' if spec.tie_embeddings else ''}"),
        row("parameters", f"{manifest.parameters:,}"),
        row("in the source", ", ".join(f"{kind} {readable(size)}" for kind, size in manifest.bytes_by_dtype.items())),
        row("to load", f"{readable(manifest.weights_bytes)} of {manifest.weights_dtype}"),
        row(
            "KV a token", ", ".join(f"{readable(size)} in {kind}" for kind, size in facts["kv_bytes_per_token"].items())
        ),
        row("", f"(2 x {spec.num_layers} layers x {spec.num_kv_heads} KV heads x {spec.head_dim} x bytes)"),
        row("chat template", "yes" if manifest.has_chat_template else "no: only /v1/completions"),
    ]


def _plan(resolved: Resolved, limits: Limits) -> dict[str, Any]:
    return {
        "memory_limit_bytes": resolved.memory_limit_bytes,
        "split": {row.owner: row.bytes for row in memory_plan(resolved)},
        "dtype": resolved.dtype,
        "kv_blocks": resolved.kv_blocks,
        "block_size": resolved.block_size,
        "kv_tokens": resolved.kv_blocks * resolved.block_size,
        "max_model_len": resolved.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "whole_contexts": _whole_contexts(resolved),
        "reasons": resolved.reasons,
    }


def _whole_contexts(resolved: Resolved) -> int:
    """How many sequences can be as long as the context allows, at the same time."""
    return resolved.kv_blocks // blocks_for(resolved.max_model_len, resolved.block_size)


def _planned(resolved: Resolved, limits: Limits) -> list[str]:
    tokens = resolved.kv_blocks * resolved.block_size
    return [
        "",
        f"In {readable(resolved.memory_limit_bytes)} ({resolved.reasons['memory_limit_bytes']}):",
        *(f"  {row.owner:<12}{readable(row.bytes):>10}  {row.reason}" for row in memory_plan(resolved)),
        "",
        f"What fits: {resolved.kv_blocks} blocks of {resolved.block_size} tokens = {tokens} tokens in all;",
        f"  a context of up to {resolved.max_model_len} tokens; {limits.max_num_seqs} sequences at once,"
        f" {_whole_contexts(resolved)} of them at full length.",
    ]
