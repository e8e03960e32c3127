"""Rules 3, 7 and 9 of the house: files and functions stay small, no state hides in a module, every module says what it
owns. Exceptions stand in lists that may only shrink: an entry that is no longer needed fails too."""

import ast
import re
from collections.abc import Iterator

from tests.architecture.source import PACKAGES, REPO, Source, sources

MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60

# "path" → lines; "path::function" → lines. May only shrink.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
# Files with a complex function that ruff is told to let pass.
COMPLEX_FILES: set[str] = set()
# "path::name" of module-level values that are mutable for a reason.
MUTABLE_STATE: dict[str, str] = {}

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Containers that a module may not hold under a lower-case name: whoever imports it could fill them.
_CONTAINER_CALLS = {"list", "dict", "set", "deque", "defaultdict", "OrderedDict", "Counter", "bytearray", "WeakSet"}
_CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_MUTATORS = {
    "append",
    "add",
    "update",
    "pop",
    "clear",
    "extend",
    "setdefault",
    "remove",
    "insert",
    "discard",
    "popitem",
}


def functions(source: Source) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Each function and method with its dotted name inside the file."""

    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (*_FUNCTIONS, ast.ClassDef))
            name = f"{prefix}{child.name}" if named else prefix
            if isinstance(child, _FUNCTIONS):
                yield name, child
            yield from below(child, f"{name}." if named else prefix)

    yield from below(source.tree, "")


def only_shrinks(measured: dict[str, int], most: int, exceptions: dict[str, int], what: str) -> None:
    """Fails for what is over `most` and not excepted, over its exception, or excepted without need."""
    grown = {k: v for k, v in measured.items() if v > max(most, exceptions.get(k, 0))}
    assert not grown, f"{what} over {most}: {grown}"
    slack = {k: f"{v} → {measured.get(k, 'gone')}" for k, v in exceptions.items() if measured.get(k, 0) < v}
    assert not slack, f"lower or drop these exceptions, they may only shrink: {slack}"


def test_files_are_short() -> None:
    only_shrinks({s.path: s.lines for s in sources()}, MOST_FILE_LINES, LONG_FILES, "lines of a file")


def test_functions_are_short() -> None:
    measured = {
        f"{s.path}::{name}": (f.end_lineno or f.lineno) - f.lineno + 1 for s in sources() for name, f in functions(s)
    }
    only_shrinks(measured, MOST_FUNCTION_LINES, LONG_FUNCTIONS, "lines of a function")


def test_functions_are_simple() -> None:
    """Ruff counts complexity (C901, at most 12); here only who is let off."""
    waived = {s.path for s in sources() if re.search(r"#\s*(ruff:\s*)?noqa(:.*C901|\s*$)", s.text, re.MULTILINE)}
    assert waived == COMPLEX_FILES


def test_no_global_statement() -> None:
    found = [f"{s.path}:{n.lineno}" for s in sources() for n in ast.walk(s.tree) if isinstance(n, ast.Global)]
    assert not found


def module_level_containers(source: Source) -> dict[str, int]:
    """Names bound at module level to a mutable container, and where."""
    found = {}
    for node in source.tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        called = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _CONTAINER_CALLS
        if called or isinstance(value, _CONTAINERS):
            found.update({t.id: node.lineno for t in targets if isinstance(t, ast.Name) and t.id != "__all__"})
    return found


def mutated_names(source: Source) -> set[str]:
    """Names whose value is changed in place anywhere in the file: `x[k] = v`, `del x[k]`, `x.append(v)`, `x += …`."""
    found = set()
    for node in ast.walk(source.tree):
        holder: ast.AST | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            holder = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
            holder = node.func.value
        elif isinstance(node, ast.AugAssign):
            holder = node.target
        if isinstance(holder, ast.Name):
            found.add(holder.id)
    return found


def test_no_module_level_mutable_state() -> None:
    """A table at module level is fine (upper case, filled where it is written, never changed); a store is not."""
    found = {}
    for source in sources():
        mutated = mutated_names(source)
        for name, line in module_level_containers(source).items():
            if name in mutated or name != name.upper():
                found[f"{source.path}::{name}"] = line
    new = {k: line for k, line in found.items() if k not in MUTABLE_STATE}
    assert not new, f"hand state in through a constructor instead: {new}"
    assert not set(MUTABLE_STATE) - set(found), "these exceptions are not needed any more"


def test_init_files_are_empty() -> None:
    full = [s.path for s in sources() if s.path.endswith("__init__.py") and s.text]
    assert not full


def test_every_folder_of_code_is_a_package_that_the_wheel_lists() -> None:
    import tomllib

    listed = set(tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {str(p.parent.relative_to(REPO)).replace("/", ".") for x in PACKAGES for p in (REPO / x).rglob("*.py")}
    assert listed == folders
    bare = [f for f in folders if not (REPO / f.replace(".", "/") / "__init__.py").exists()]
    assert not bare


def test_every_module_says_what_it_owns() -> None:
    silent = [s.path for s in sources() if s.text and not ast.get_docstring(s.tree)]
    assert not silent


def test_public_classes_say_what_they_are() -> None:
    """That is where shapes, units and errors stand."""
    silent = [
        f"{s.path}::{node.name}"
        for s in sources()
        for node in s.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not silent


def test_the_state_check_tells_a_table_from_a_store() -> None:
    text = "TABLE = {'a': 1}\nCACHE = {}\nnames = []\ndef f(k):\n    CACHE[k] = 1\n"
    source = Source("x.py", "x", text, ast.parse(text))
    assert set(module_level_containers(source)) == {"TABLE", "CACHE", "names"}
    assert mutated_names(source) == {"CACHE"}
