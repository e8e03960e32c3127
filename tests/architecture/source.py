"""What the architecture tests look at: our packages' source files, parsed once."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("autotune", "daemon", "engine", "k8s", "runbooks", "telemetry", "tui")

# Where torch may be imported (architecture page, 'Floors'). An entry is a module or a package with all below it.
# engine.process is exec'd, never imported by the daemon; engine.prepare and engine.evaluate are `python -m` commands.
TORCH_ALLOWED = (
    "engine.device",
    "engine.evaluate",
    "engine.kernels",
    "engine.kv.store",
    "engine.layers",
    "engine.load",
    "engine.models",
    "engine.prepare",
    "engine.process",
    "engine.quant",
    "engine.parallel",
    "telemetry.probe",
)


@dataclass(frozen=True)
class Source:
    """One file: `path` relative to the repository, dotted `module`, its text and syntax tree."""

    path: str
    module: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")


@cache
def sources() -> tuple[Source, ...]:
    """Every Python file of our packages (tests are not part of the house)."""
    found = []
    for package in PACKAGES:
        for path in sorted((REPO / package).rglob("*.py")):
            name = path.relative_to(REPO)
            module = ".".join(name.with_suffix("").parts).removesuffix(".__init__")
            text = path.read_text(encoding="utf-8")
            found.append(Source(str(name), module, text, ast.parse(text)))
    return tuple(found)


def torch_allowed(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in TORCH_ALLOWED)
