"""Imports the sibling modules of a leaf folder, so that adding a feature is adding a file.

It must not know what the modules hold. Enter at `load`.
"""

import importlib
import pkgutil
from types import ModuleType


def load(package: str) -> list[ModuleType]:
    """Every module of `package` (not of its sub-packages), in the order of their names. Import errors are raised."""
    parent = importlib.import_module(package)
    names = sorted(info.name for info in pkgutil.iter_modules(parent.__path__) if not info.ispkg)
    return [importlib.import_module(f"{package}.{name}") for name in names]
