"""`inferd serve`: put a model on the network. Flags are settings (daemon/settings.py); daemon/serving.py does the work.

Owns the flags, what start-up prints, --check and --plan. Whatever is dear to import is imported when it is needed, so
that `inferd --help` is quick. Enter at `command`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.objective import PRESETS
from daemon.settings import Loaded, Settings, load

if TYPE_CHECKING:
    from daemon.library import Prepared
    from daemon.port import EngineView
    from daemon.serving import Addresses
    from engine.config import EngineConfig
    from telemetry.events import Event

# Few on purpose: every other setting has a name in the file and the environment.
_FLAGS = (
    "host",
    "port",
    "served_model_name",
    "device",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "memory_limit",
    "api_key_file",
    "admin_port",
    "admin_key_file",
    "allow_origin",
    "grace",
    "target_ttft",
    "target_inter_token",
    "drill",
    "log_format",
)


def _flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each of _FLAGS; values are checked by daemon.settings, so that all sources are told alike."""
    known = {f.name: f for f in fields(Settings)}
    for name in reversed(_FLAGS):
        default = known[name].default
        shown = "" if default in (None, ()) else f" [default: {default}]"
        option = click.option(
            f"--{name.replace('_', '-')}",
            name,
            metavar="VALUE",
            multiple=isinstance(default, tuple),
            help=known[name].metadata["help"] + shown,
        )
        function = option(function)
    return function


@click.command(short_help="Serve a model over the OpenAI API.")
@click.argument("model", required=False)
@_flags
@click.option(
    "--config", metavar="FILE", help="Configuration file; else $INFERD_CONFIG, ./inferd.toml, the user's, /etc."
)
@click.option("--profile", metavar="FILE", help="Settings that `inferd tune search` found; they precede the file's.")
@click.option(
    "--for",
    "tune_for",
    metavar="VALUE",
    help="What it is for: targets at the 95th percentile and first limits for the tuner. "
    + ". ".join(f"{name}: {preset.described()}" for name, preset in PRESETS.items())
    + ".",
)
@click.option("--check", is_flag=True, help="Check settings and model, start nothing.")
@click.option("--plan", is_flag=True, help="Print the memory plan, start nothing.")
def command(model: str | None, config: str | None, profile: str | None, check: bool, plan: bool, **flags: Any) -> int:
    """Serve MODEL: a name of the library (`inferd models list`), a .gguf file or a model directory.

    Settings come from defaults, a TOML file, INFERD_* variables and these flags, later ones first; see
    inferd.example.toml for all of them.
    """

    def read() -> Loaded:
        return load({"model": model, **flags}, config=config, profile=profile)

    loaded = read()
    if plan:
        return _print_plan(loaded)
    if check:
        return _check(loaded)
    return _serve(loaded, read)


def _serve(loaded: Loaded, read: Callable[[], Loaded]) -> int:
    import asyncio

    from daemon import logs, paths
    from daemon.cli import version
    from daemon.house import Model
    from daemon.serving import Daemon
    from daemon.session import EngineSession
    from engine.text import Text

    logs.configure(loaded.settings.log_format, loaded.settings.log_level)
    state_dir, runtime_dir = paths.state_dir(), paths.runtime_dir()
    with paths.lock(state_dir):
        found = _find_model(loaded.settings.model)
        config = engine_config(loaded.settings, found.directory, state_dir)
        announcer = _Announcer(found.name, loaded)
        model = Model(name=found.name, text=Text(found.directory), eos_token_ids=found.manifest.eos_token_ids)

        async def run() -> int:
            def make_engine(publish: "Callable[[Event], None]") -> EngineSession:
                return EngineSession(
                    config, runtime_dir, publish, progress_deadline_s=loaded.settings.progress_deadline
                )

            daemon = Daemon(
                loaded,
                model,
                make_engine,
                runtime_dir=runtime_dir,
                state_dir=state_dir,
                version=version(),
                read=read,
                on_listening=announcer.listening,
                on_ready=announcer.ready,
            )
            return await daemon.run()

        return asyncio.run(run())


def _find_model(source: str) -> "Prepared":
    """The model, fetched and prepared first if need be."""
    from daemon.library import Library
    from daemon.paths import cache_dir
    from daemon.progress import Progress

    progress = Progress()
    try:
        return Library(cache_dir(), progress).prepare(source)
    finally:
        progress.done()


def engine_config(settings: Settings, directory: Path, state_dir: Path | None) -> "EngineConfig":
    """What is asked of the engine."""
    from daemon.paths import cache_dir
    from engine.config import EngineConfig
    from telemetry import probe

    return EngineConfig(
        model_dir=str(directory),
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        memory_limit_bytes=settings.memory_limit,
        block_size=settings.block_size,
        prefix_cache=settings.prefix_cache,
        without=settings.without,
        threads=settings.threads,
        daemon_bytes=probe.resident_bytes() or 0,
        state_dir=str(state_dir) if state_dir else None,
        cache_dir=str(cache_dir()),
        faults=bool(settings.drill),
    )


def _print_plan(loaded: Loaded) -> int:
    from engine.budget import holds, memory_plan, readable, resolve
    from engine.machine import host_facts

    found = _find_model(loaded.settings.model)
    config = engine_config(loaded.settings, found.directory, None)
    resolved, _ = resolve(config, found.manifest, host_facts(config, found.manifest))
    click.echo(f"{found.name} on {resolved.device}, {resolved.dtype}: {readable(resolved.memory_limit_bytes)}")
    for row in memory_plan(resolved):
        click.echo(f"  {row.owner:<12} {readable(row.bytes):>9}  {row.reason}")
    click.echo(f"{holds(resolved)}.")
    click.echo("Ceilings:")
    for name, value in resolved.ceilings().items():
        if name != "spec_depth":
            click.echo(f"  {name:<24} {value:>9}")
    click.echo("Chosen, and why:")
    for name, why in resolved.reasons.items():
        click.echo(f"  {name:<20} {getattr(resolved, name)!s:>12}  {why}")
    return 0


def _check(loaded: Loaded) -> int:
    from daemon.admission import Keys
    from daemon.serving import check_exposure
    from engine.text import Text

    settings = loaded.settings
    check_exposure(settings.host, Keys.load(settings.api_key_file, settings.api_key))
    Keys.load(settings.admin_key_file, settings.admin_key)
    found = _find_model(settings.model)
    Text(found.directory)
    engine_config(settings, found.directory, None)
    for name, entry in loaded.public().items():
        if entry["source"] != "default":
            click.echo(f"{name} = {entry['value']}  ({entry['source']})")
    click.echo(f"{found.name} can be served from {found.directory}")
    return 0


@dataclass(slots=True)
class _Announcer:
    """What start-up prints: the address when it listens; how it came out and what to try when it is ready, and not
    before, since a start that is refused leaves nothing to try."""

    model: str
    loaded: Loaded
    where: "Addresses | None" = None

    def listening(self, where: "Addresses") -> None:
        self.where = where
        click.echo(f"inferd serves {self._name()} at {where.api} (it is loading)")
        if where.admin:
            click.echo(f"Admin port: {where.admin}")

    def ready(self, view: "EngineView") -> None:
        _say_engine(view)
        if self.where is not None:
            self._say_what_to_try(self.where)

    def _name(self) -> str:
        """The name for clients."""
        return (*self.loaded.settings.served_model_name, self.model)[0]

    def _say_what_to_try(self, where: "Addresses") -> None:
        settings, name = self.loaded.settings, self._name()
        key = "" if not (settings.api_key or settings.api_key_file) else " -H 'Authorization: Bearer …'"
        chat = f'{{"model":"{name}","messages":[{{"role":"user","content":"Name three rivers."}}],"stream":true}}'
        click.echo("Try:")
        click.echo(f"  curl -N {where.api}/v1/chat/completions -H 'content-type: application/json'{key} \\")
        click.echo(f"    -d '{chat}'")
        click.echo("Where the time and the memory go:")
        click.echo(f"  curl --unix-socket {where.control} http://inferd/inferd/v1/snapshot")
        click.echo(f"  curl {where.api}/metrics")


def _say_engine(view: "EngineView") -> None:
    from engine.budget import holds, memory_plan, readable

    resolved, limits = view.resolved, view.limits
    if resolved is None or limits is None:
        click.echo("Ready.")
        return
    parts = ", ".join(f"{row.owner} {readable(row.bytes)}" for row in memory_plan(resolved))
    seconds = view.phases.get("total", 0) / 1e9
    click.echo(
        f"Ready after {seconds:.1f} s: {resolved.device}, {resolved.dtype}, context {limits.context_limit} tokens, "
        f"{limits.max_num_seqs} at once."
    )
    click.echo(f"Device: {resolved.reasons['device']}.")
    click.echo(f"Memory: {readable(resolved.memory_limit_bytes)} = {parts}")
    click.echo(f"{holds(resolved)}.")
