"""The default model, served by a real daemon: one daemon a module, since starting it takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.served import Served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(Path(tmp_path_factory.mktemp("served")), "smollm2", ready_s=300) as daemon:
        yield daemon
