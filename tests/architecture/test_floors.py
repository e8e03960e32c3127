"""The floors: import-linter's contracts hold, they list every module they should, and torch stays where it may be."""

import subprocess
import sys

import grimp
import pytest

from tests.architecture.source import PACKAGES, REPO, sources, torch_allowed

# The engine's torch-free parts. Facts are what every floor above may know; they know nothing but each other.
FACTS = (
    "engine.budget",
    "engine.config",
    "engine.errors",
    "engine.kv.layout",
    "engine.machine",
    "engine.manifest",
    "engine.modelspec",
    "engine.names",
    "engine.packing",
    "engine.request",
    "engine.toolchain",
)
# What touches processes, sockets or files: neither plane. Whatever else of the engine is torch-free is control plane.
EDGES = (
    "engine.loop",
    "engine.outbox",
    "engine.process",
    "engine.server",
    "engine.text",
    "engine.environment",
    "engine.wire",
)


def may_import(module: str, allowed: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in allowed)


CONTROL_PLANE = tuple(
    s.module
    for s in sources()
    if s.module.startswith("engine.")
    and s.text
    and not torch_allowed(s.module)
    and not may_import(s.module, (*FACTS, *EDGES))
)
HEAVY = ("torch", "transformers", "triton")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


def test_import_linter_agrees() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_torch_stays_in_the_device_plane(graph: grimp.ImportGraph) -> None:
    """No chain of imports leads from a torch-free module to torch, not even through a lazy import; telemetry.probe's
    lazy one is the exception by design."""
    for heavy in HEAVY:
        if heavy in graph.modules and graph.direct_import_exists(importer="telemetry.probe", imported=heavy):
            graph.remove_import(importer="telemetry.probe", imported=heavy)
    chains = {
        source.module: graph.find_shortest_chain(importer=source.module, imported=heavy)
        for source in sources()
        if not torch_allowed(source.module)
        for heavy in HEAVY
        if heavy in graph.modules
    }
    found = {module: " → ".join(chain) for module, chain in chains.items() if chain}
    assert not found


@pytest.mark.parametrize(
    ("importers", "allowed"),
    [
        (FACTS, ("telemetry", *FACTS)),
        (("telemetry",), ("telemetry",)),
        (("tui",), ("tui", "telemetry")),
        (("runbooks",), ("runbooks", "telemetry", *FACTS)),
        (("k8s",), ("k8s", "telemetry", *FACTS)),
        (("autotune",), ("autotune", "telemetry", *FACTS, *CONTROL_PLANE)),
        (CONTROL_PLANE, ("telemetry", *FACTS, *CONTROL_PLANE)),
    ],
    ids=["facts", "telemetry", "tui", "runbooks", "k8s", "autotune", "control-plane"],
)
def test_each_floor_imports_only_what_it_may(
    graph: grimp.ImportGraph, importers: tuple[str, ...], allowed: tuple[str, ...]
) -> None:
    ours = {s.module for s in sources() if s.text}
    for module in sorted(m for m in ours if may_import(m, importers)):
        used = graph.find_modules_directly_imported_by(module) & ours
        assert not sorted(m for m in used if not may_import(m, allowed)), module


def test_scheduler_and_device_never_see_each_other(graph: grimp.ImportGraph) -> None:
    for module in set(CONTROL_PLANE) - {"engine.plan"}:  # the plan is what they share
        assert graph.find_shortest_chain(importer=module, imported="engine.device") is None, module
        for device in graph.find_descendants("engine.device"):
            assert graph.find_shortest_chain(importer=module, imported=device) is None, (module, device)
            assert graph.find_shortest_chain(importer=device, imported=module) is None, (device, module)


def test_the_device_plane_needs_no_messages(graph: grimp.ImportGraph) -> None:
    """It must run from a bare checkout on a machine with torch alone."""
    plane = [s.module for s in sources() if s.module.startswith(("engine.device", "engine.models", "engine.layers"))]
    for module in plane:
        for library in ("msgspec", "zmq", "aiohttp", "click"):
            if library in graph.modules:
                assert graph.find_shortest_chain(importer=module, imported=library) is None, (module, library)


def test_packages_do_not_import_each_other_in_circles(graph: grimp.ImportGraph) -> None:
    """No two modules reach each other, at any depth."""
    ours = {s.module for s in sources() if s.text}
    edges = {m: graph.find_modules_directly_imported_by(m) & ours for m in ours}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path, module))
        if module in done:
            return
        for below in sorted(edges[module]):
            visit(below, (*path, module))
        done.add(module)

    for module in sorted(ours):
        visit(module, ())


# A finder that refuses torch, put in front of all others in a fresh interpreter.
_BLOCKED = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "triton"}:
            raise ImportError(f"{name} is imported by a torch-free module")
        return None
sys.meta_path.insert(0, Refuse())
for module in sys.argv[1:]:
    importlib.import_module(module)
assert not {"torch", "transformers", "triton"} & set(sys.modules)
"""


def test_the_cli_and_every_torch_free_module_import_with_torch_out_of_reach() -> None:
    """One interpreter without torch imports them all: the command line, every command, the control plane."""
    extras = ("tui", "k8s")  # need textual and kopf, which the base install lacks
    modules = [
        s.module for s in sources() if s.text and not torch_allowed(s.module) and s.module.split(".")[0] not in extras
    ]
    assert modules
    done = subprocess.run(
        [sys.executable, "-c", _BLOCKED, *modules], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
